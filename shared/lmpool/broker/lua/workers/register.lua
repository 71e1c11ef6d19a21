-- Register a worker of a model until a deadline, by the server's clock. The next call sets a later deadline.
--
-- KEYS  deadlines, and for a worker that serves: jobs, capacities, lanes, its lane
-- ARGV  worker, lease in ms, lifetime of the keys in ms, and for a worker that serves: consumer group, number of prompts that it
--       computes at once (0 if it takes no more jobs)
--
-- The capacities and the lengths of the lanes have their sums under "". The script creates the consumer, because servers older than
-- Valkey 9 list a consumer only after it has received a job. Keys that hold another type are replaced.
--
-- Returns the length of the worker's lane.

-- include time

local deadlines, worker = KEYS[1], ARGV[1]
local deadline = now_ms() + ARGV[2]
if type(redis.pcall('ZADD', deadlines, deadline, worker)) == 'table' then
  redis.call('UNLINK', deadlines)
  redis.call('ZADD', deadlines, deadline, worker)
end
redis.call('PEXPIRE', deadlines, ARGV[3])
if not KEYS[2] then
  return 0
end

-- The reply of a command, or `default` after a value of another type was removed.
local function read(default, command, key, ...)
  local value = redis.pcall(command, key, ...)
  if type(value) == 'table' then
    redis.call('UNLINK', key)
    return default
  end
  return value
end

local jobs, capacities, lanes, lane, size = KEYS[2], KEYS[3], KEYS[4], KEYS[5], tonumber(ARGV[5])
local before = tonumber(read(false, 'HGET', capacities, worker)) or 0
if size == 0 then
  redis.call('HDEL', capacities, worker)
elseif before ~= size then
  redis.call('HSET', capacities, worker, size)
end
if size ~= before and type(redis.pcall('HINCRBY', capacities, '', size - before)) == 'table' then
  -- The sum is not a number, so start a new hash. The other workers add their capacities when they register next.
  redis.call('UNLINK', capacities)
  redis.call('HSET', capacities, worker, size, '', size)
end
redis.call('PEXPIRE', capacities, ARGV[3])
redis.call('XGROUP', 'CREATECONSUMER', jobs, ARGV[4], worker)
local length, counted = read(0, 'XLEN', lane), tonumber(read(false, 'ZSCORE', lanes, worker)) or 0
redis.call('ZADD', lanes, length, worker)
redis.call('ZINCRBY', lanes, length - counted, '')
redis.call('PEXPIRE', lanes, ARGV[3])
return length
