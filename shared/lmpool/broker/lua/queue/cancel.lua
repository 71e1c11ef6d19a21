-- Take a client off prompts; a job that nobody waits for and no worker holds is removed.
--
-- KEYS  jobs, reply key of the client, then per prompt: waiting key
-- ARGV  consumer group
--
-- Returns how many jobs were removed.

-- include fair_queue

local reply = KEYS[2]
local removed = 0
for i = 3, #KEYS do
  local waiting = KEYS[i]
  -- What is there may be anything, and its job no entry id.
  local job, sole = read_waiting(waiting)
  if sole == reply or redis.pcall('HDEL', waiting, reply) == 1 and redis.call('HLEN', waiting) == 1 then
    if job == LATER then
      drop_later(string.sub(waiting, -16), reply)
      redis.call('UNLINK', waiting)
      removed = removed + 1
    elseif job then
      local stream, id = locate(job)
      -- A job that a worker holds stays registered, so that others can still join it.
      if #redis.pcall('XPENDING', stream, ARGV[1], id, id, 1) == 0 then
        remove_entries({job})
        redis.call('UNLINK', waiting)
        removed = removed + 1
      elseif sole then
        expand(waiting, job)
      end
    end
  end
end
move_up()
return removed
