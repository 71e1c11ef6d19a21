-- Cancel a client's prompts: the client no longer waits for them, and jobs that no client waits for and no worker holds are removed.
--
-- KEYS  jobs, reply key of the client, then per prompt: waiting key
-- ARGV  consumer group
--
-- Returns the number of removed jobs.

-- include fair_queue

local reply, removed = KEYS[2], 0
for i = 3, #KEYS do
  local waiting = KEYS[i]
  local job, sole = read_waiting(waiting)
  local stream, id = locate(job or '')
  local is_last = sole == reply or redis.pcall('HDEL', waiting, reply) == 1 and redis.call('HLEN', waiting) == 1
  if is_last and job and (job == LATER or #redis.pcall('XPENDING', stream, ARGV[1], id, id, 1) == 0) then
    if job == LATER then
      drop_later(string.sub(waiting, -16), reply)
    else
      remove_entries({job})
    end
    redis.call('UNLINK', waiting)
    removed = removed + 1
  elseif sole == reply then
    -- The waiting key of a job that a worker holds stays, so that other clients can still join the job.
    expand(waiting, job)
  end
end
move_up()
return removed
