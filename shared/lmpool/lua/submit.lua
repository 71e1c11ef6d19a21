-- Register a client for prompts, and queue those that nobody asked for yet.
--
-- KEYS  jobs, reply key of the client, then per prompt: waiting key
--       and, unless check_rows is 0, after all of those per prompt: row key
-- ARGV  queue limit, lifetime of a waiting key in ms, check_rows (0|1), again (0|1),
--       then per prompt: encoded job
--
-- again: the caller has waited long; make sure that the job it waits for still exists.
--
-- Returns one character per prompt: Q queued now, J joined a job that exists, F refused because the queue
-- is full, R the row is in the cache (it was stored after the client looked).
local jobs, reply = KEYS[1], KEYS[2]
local limit, lifetime = tonumber(ARGV[1]), ARGV[2]
local check_rows, again = ARGV[3] == '1', ARGV[4] == '1'
local count = #ARGV - 4
local depth = redis.call('XLEN', jobs)
local outcome = {}
for i = 1, count do
  local waiting = KEYS[2 + i]
  local row = KEYS[2 + count + i]
  local size = check_rows and redis.pcall('STRLEN', row) or 0
  if type(size) == 'table' then
    -- Something else than a string: nobody could read it, and no row could be stored.
    redis.call('DEL', row)
    size = 0
  end
  if size > 0 then
    outcome[i] = 'R'
  else
    local job = redis.pcall('HGET', waiting, 'job')
    if type(job) == 'table' then
      -- No hash: nobody can be waiting there.
      redis.call('DEL', waiting)
      job = false
    end
    -- What stands there may be no entry id: then there is no such job either.
    if job and again and #redis.pcall('XRANGE', jobs, job, job) == 0 then
      job = false
    end
    if job then
      redis.call('HSET', waiting, reply, '')
      outcome[i] = 'J'
    elseif depth >= limit then
      outcome[i] = 'F'
    else
      job = redis.call('XADD', jobs, '*', 'm', ARGV[4 + i])
      redis.call('HSET', waiting, 'job', job, reply, '')
      depth = depth + 1
      outcome[i] = 'Q'
    end
    if outcome[i] ~= 'F' then
      redis.call('PEXPIRE', waiting, lifetime)
    end
  end
end
return table.concat(outcome)
