-- Queue a dead letter's job again, with no deliveries, and take the letter off the dead.
--
-- KEYS  jobs, dead, waiting key of the job's digest
-- ARGV  entry id among the dead, encoded job as the caller saw it, queue limit, lifetime of the waiting key in ms
--
-- The field 'keep' of the waiting key says that the job is wanted although no client waits for it: its row is to be
-- cached for the client that asks next. What only bulk clients had waited for yields to others again.
--
-- Returns Q queued, J a job for the same is under way so that nothing had to be queued, F refused because the queue is
-- full, G the letter is gone or is another.

-- include fair_queue

local dead, waiting = KEYS[2], KEYS[3]
local letter = redis.call('XRANGE', dead, ARGV[1], ARGV[1])[1]
local said = {}
for i = 1, letter and #letter[2] or 0, 2 do
  said[letter[2][i]] = letter[2][i + 1]
end
local data = said.m
if data ~= ARGV[2] then
  return 'G'
end
local job, sole, is_junk = read_waiting(waiting)
if sole then
  expand(waiting, job, sole)
elseif is_junk then
  redis.call('UNLINK', waiting)
end
local outcome = 'J'
if not job or job == DONE or not is_queued(job, waiting) then
  if redis.call('XLEN', jobs) + in_lanes() + count_at('ZCARD', backlog) >= tonumber(ARGV[3]) then
    return 'F'
  end
  local priority = said.p == BULK and {'p', BULK} or {}
  redis.call('HSET', waiting, 'job', redis.call('XADD', jobs, '*', 'm', data, 'u', ARGV[4], unpack(priority)))
  outcome = 'Q'
end
-- Also where a client waits: it may give up.
redis.call('HSET', waiting, 'keep', '')
redis.call('PEXPIRE', waiting, ARGV[4])
redis.call('XDEL', dead, ARGV[1])
return outcome
