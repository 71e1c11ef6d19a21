-- Remove jobs that a worker holds and that nobody waits for any more: cancelled, or expired with their clients.
--
-- KEYS  jobs, then per job: waiting key
-- ARGV  per job: entry id, until when it is waited for in ms as far as is known
--
-- Returns the numbers of the jobs that were removed.

-- include queue

local removed, now = {}, now_ms()
for i = 1, #KEYS - 1 do
  local waiting, entry = KEYS[1 + i], ARGV[2 * i - 1]
  if not is_wanted(waiting, ARGV[2 * i], now) then
    redis.call('DEL', waiting)
    redis.call('XACK', jobs, GROUP, entry)
    redis.call('XDEL', jobs, entry)
    removed[#removed + 1] = i
  end
end
return removed
