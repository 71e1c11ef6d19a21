-- Set a later deadline for a worker that serves a model, by the server's clock, and give one worker at a time the turn to check for jobs
-- and workers that are lost.
--
-- KEYS  deadlines, turn, complete turn, jobs, capacities
-- ARGV  worker, lease in ms, consumer group, ms until the next turn (0: this worker takes no turn and no jobs), ms until the next
--       complete turn
--
-- Returns {number of workers that take jobs (0 if the server has lost the registration of this worker), turn: 0 for none, 1 if
-- nothing seems lost, 2 if jobs of the shared stream are held or deadlines of workers have passed, 3 for a complete turn, server time in
-- ms}.

-- include time

local deadlines, turn, jobs, now = KEYS[1], KEYS[2], KEYS[4], now_ms()
local is_new = redis.pcall('ZADD', deadlines, now + ARGV[2], ARGV[1]) ~= 0
if is_new and redis.call('PTTL', deadlines) == -1 then
  -- The server has lost the key. The caller registers again, which sets the usual lifetime.
  redis.call('PEXPIRE', deadlines, ARGV[2])
end
if is_new or ARGV[4] ~= '0' and redis.pcall('HEXISTS', KEYS[5], ARGV[1]) ~= 1 then
  return {0, 3, now}
end
local workers = math.max(1, (tonumber(redis.pcall('HLEN', KEYS[5])) or 0) - 1)
if ARGV[4] == '0' or not redis.call('SET', turn, ARGV[1], 'NX', 'PX', ARGV[4]) then
  return {workers, 0, now}
end
if redis.call('SET', KEYS[3], ARGV[1], 'NX', 'PX', ARGV[5]) then
  return {workers, 3, now}
end
local held = redis.pcall('XPENDING', jobs, ARGV[3])
local has_held = type(held) ~= 'table' or held.err or held[1] ~= 0
return {workers, (has_held or redis.call('ZCOUNT', deadlines, '-inf', '(' .. now) > 0) and 2 or 1, now}
