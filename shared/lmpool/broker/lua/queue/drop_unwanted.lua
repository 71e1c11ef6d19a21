-- Remove jobs that a worker holds and no client waits for: the clients cancelled them, or their deadlines have passed.
--
-- KEYS  jobs, then per job: waiting key
-- ARGV  per job: entry, deadline in ms since 1970 that the job carries
--
-- Returns the indexes of the removed jobs.

-- include waiting
-- include time

local removed, is_left, now = {}, {}, now_ms()
for i = 1, #KEYS - 1 do
  local waiting, entry = KEYS[1 + i], ARGV[2 * i - 1]
  if is_left[waiting] or not is_wanted(waiting, ARGV[2 * i], now) then
    -- Other jobs for the same prompt, which find no waiting key, are removed too.
    is_left[waiting] = redis.call('UNLINK', waiting) == 1 or is_left[waiting]
    remove_entries({entry}, true)
    removed[#removed + 1] = i
  end
end
return removed
