-- Remove abandoned jobs, which a worker holds and nobody waits for any more: cancelled, or expired with their clients.
--
-- KEYS  jobs, then per job: waiting key
-- ARGV  per job: entry, until when it is waited for in ms as far as is known
--
-- Returns the numbers of the jobs that were removed.

-- include fair_queue

local removed, left, now = {}, {}, now_ms()
for i = 1, #KEYS - 1 do
  local waiting, entry = KEYS[1 + i], ARGV[2 * i - 1]
  if left[waiting] or not is_wanted(waiting, ARGV[2 * i], now) then
    -- The key tells other jobs for the same prompt that all have left it, and it is removed here.
    left[waiting] = redis.call('UNLINK', waiting) == 1 or left[waiting]
    remove_entries({entry})
    removed[#removed + 1] = i
  end
end
return removed
