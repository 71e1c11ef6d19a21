-- Be one of the workers of a model until a deadline, which the next call puts off.
--
-- KEYS  deadlines, and of a worker that serves: jobs, capacities, lanes, its lane
-- ARGV  worker, lease in ms, lifetime of the keys in ms, and of a worker that serves: consumer group, prompts that it
--       computes at once, 0 for one that takes nothing more
--
-- The deadlines are times of the server. The sum of all capacities stands under '' beside them, and that of the lengths of all
-- lanes, so that who needs it need not add them up. Redis before Valkey 9 lists a consumer only when it has got a job, and a
-- server may have lost the queue: so the consumer is made here.
--
-- Returns how long the worker's lane is.

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
  return 0
end
local jobs, capacities, lanes, lane, size = KEYS[2], KEYS[3], KEYS[4], KEYS[5], tonumber(ARGV[5])
local before = redis.pcall('HGET', capacities, worker)
if type(before) == 'table' then
  redis.call('UNLINK', capacities)
  before = false
end
if size == 0 then
  redis.call('HDEL', capacities, worker)
elseif tonumber(before) ~= size then
  redis.call('HSET', capacities, worker, size)
end
local more = size - (tonumber(before) or 0)
if more ~= 0 and type(redis.pcall('HINCRBY', capacities, '', more)) == 'table' then
  -- The sum is none: all workers say it anew.
  redis.call('UNLINK', capacities)
  redis.call('HSET', capacities, worker, size, '', size)
end
redis.call('PEXPIRE', capacities, ARGV[3])
redis.call('XGROUP', 'CREATECONSUMER', jobs, ARGV[4], worker)
local length = redis.pcall('XLEN', lane)
if type(length) == 'table' then
  -- Something else than a stream: the worker makes a new one when it reads it.
  redis.call('UNLINK', lane)
  length = 0
end
local counted = redis.pcall('ZSCORE', lanes, worker)
if type(counted) == 'table' then
  redis.call('UNLINK', lanes)
  counted = false
end
redis.call('ZADD', lanes, length, worker)
redis.call('ZINCRBY', lanes, length - (tonumber(counted) or 0), '')
redis.call('PEXPIRE', lanes, ARGV[3])
return length
