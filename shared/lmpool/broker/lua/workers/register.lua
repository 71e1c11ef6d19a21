-- Be one of the workers of a model until a deadline, which the next call puts off.
--
-- KEYS  deadlines, and of a worker that serves: jobs, capacities
-- ARGV  worker, lease in ms, lifetime of the keys in ms, and of a worker that serves: consumer group, prompts that it
--       computes at once
--
-- The deadlines are times of the server. The sum of all capacities stands under '' beside them, so that who needs it need not
-- add them up. Redis before Valkey 9 lists a consumer only when it has got a job, and a server may have lost the queue:
-- so the consumer is made here.

-- include time

local deadlines, worker = KEYS[1], ARGV[1]
local deadline = now_ms() + ARGV[2]
if type(redis.pcall('ZADD', deadlines, deadline, worker)) == 'table' then
  -- A value of another type.
  redis.call('UNLINK', deadlines)
  redis.call('ZADD', deadlines, deadline, worker)
end
redis.call('PEXPIRE', deadlines, ARGV[3])
if not KEYS[2] then
  return 1
end
local jobs, capacities, size = KEYS[2], KEYS[3], tonumber(ARGV[5])
local before = redis.pcall('HGET', capacities, worker)
if type(before) == 'table' then
  redis.call('UNLINK', capacities)
  before = false
end
if tonumber(before) ~= size then
  redis.call('HSET', capacities, worker, size)
  if type(redis.pcall('HINCRBY', capacities, '', size - (tonumber(before) or 0))) == 'table' then
    -- The sum is none: all workers say it anew.
    redis.call('UNLINK', capacities)
    redis.call('HSET', capacities, worker, size, '', size)
  end
end
redis.call('PEXPIRE', capacities, ARGV[3])
redis.call('XGROUP', 'CREATECONSUMER', jobs, ARGV[4], worker)
return 1
