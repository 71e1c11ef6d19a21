-- Queue the job of a dead letter again, with no deliveries, and remove the dead letter.
--
-- KEYS  jobs, dead, waiting key of the job's digest
-- ARGV  id of the dead letter, encoded job as the caller saw it, queue limit, lifetime of the waiting key in ms
--
-- The field "keep" of the waiting key marks the job as wanted although no client waits: its row is cached for later clients.
-- Returns Q: queued; J: a job for the same prompt is in flight; F: the queue is full; G: the dead letter was removed or differs.

-- include fair_queue

local dead, waiting = KEYS[2], KEYS[3]
local letter = redis.call('XRANGE', dead, ARGV[1], ARGV[1])[1]
local found = letter and read_entry(letter, '')
if not found or found.job ~= ARGV[2] then
  return 'G'
end
local job, sole = read_waiting(waiting)
if sole then
  expand(waiting, job, sole)
elseif not job then
  redis.call('UNLINK', waiting)
end
local outcome = 'J'
if not job or job == DONE or not is_queued(job, waiting) then
  if redis.call('XLEN', jobs) + in_lanes() + count_at('ZCARD', backlog) >= tonumber(ARGV[3]) then
    return 'F'
  end
  local kind = found.kind == BULK and BULK or nil
  redis.call('HSET', waiting, 'job', add_job(nil, kind, 'm', found.job, 'u', ARGV[4]))
  outcome = 'Q'
end
-- Set the field "keep" even if a client waits: the job must stay wanted if the client gives up.
redis.call('HSET', waiting, 'keep', '')
redis.call('PEXPIRE', waiting, ARGV[4])
redis.call('XDEL', dead, ARGV[1])
return outcome
