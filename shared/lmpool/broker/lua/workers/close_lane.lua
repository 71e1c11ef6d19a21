-- Close the lane of a worker that takes nothing more: what it has not been given goes to the shared stream.
--
-- KEYS  jobs
-- ARGV  worker
--
-- What it holds stays in its lane, and it ends that.
--
-- Returns 1 when it is to be called again at once, for there may be more to move.

-- include moving

local worker = ARGV[1]
local size = tonumber(redis.pcall('HGET', capacities, worker))
if size then
  -- Nothing is placed in the lane of a worker without capacity.
  redis.call('HDEL', capacities, worker)
  redis.pcall('HINCRBY', capacities, '', -size)
end
-- From its beginning: what has waited longest goes first.
local taken = find_to_move(worker, MOST_MOVED_AT_ONCE, false, goes_always)
move(worker, nil, taken, 1, #taken, 1)
return #taken > 0 and 1 or 0
