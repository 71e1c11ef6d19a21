-- Remove workers that are gone: consumers that hold nothing. What they were never given goes to the shared stream. And what is
-- known of clients that have nothing in the backlog.
--
-- KEYS  jobs, deadlines of the workers, capacities, virtual time
-- ARGV  consumer group, most workers and most clients to look at, lifetime of the deadlines in ms, whether to add up the
--       lengths of all lanes (0|1), then workers that are known to be gone
--
-- Looked at and removed at once: removing a consumer also drops what it holds, and a worker that only seemed
-- to be gone may take jobs at any moment. One that holds jobs, or whose lane has some, stays, so that they can be claimed.
--
-- Returns how many were removed; whether there are consumers, or, where lengths are added up, lanes, that have no deadline
-- (0|1); and how many jobs were moved: where there are any, there may be more.

-- include fair_queue

local workers, group, most = KEYS[2], ARGV[1], tonumber(ARGV[2])
local MAX_LISTED = 5000
local now, removed, has_unknown, moved = now_ms(), 0, false, 0
count_at('ZCARD', workers)
-- Forget clients whose last prompts have start times in a range.
local function forget_clients(first, last)
  for _, client in ipairs(redis.call('ZRANGEBYSCORE', virtual_time, first, last, 'LIMIT', 0, most)) do
    if client ~= NOW and not FIRST_START[client] and client ~= OWED[CONTINUED] and client ~= OWED[BULK] then
      redis.call('ZREM', virtual_time, client)
    end
  end
end

if count_at('ZCARD', virtual_time) > 1 then
  forget_clients('-inf', virtual_now())
  forget_clients(CONTINUED_TIME, virtual_now(CONTINUED))
  forget_clients(BULK_TIME, virtual_now(BULK))
end

-- Remove the lane of a worker if it is empty. Returns whether it is.
local function drop_lane(worker)
  local length = redis.pcall('XLEN', lane_of .. worker)
  if length == 0 or type(length) == 'table' then
    redis.call('UNLINK', lane_of .. worker)
    count_in_lane(worker, -(tonumber(redis.pcall('ZSCORE', lanes, worker)) or 0))
    redis.pcall('ZREM', lanes, worker)
    length = 0
  end
  return length == 0
end

-- Of the lanes' lengths the sum may be wrong, where the server has lost some of them or somebody else has written there. A new
-- shared stream knows no consumers: then a lane alone tells of a worker whose deadline was lost.
local function add_up_lanes()
  -- So many workers there are not: their heartbeats tell it anew.
  if count_at('ZCARD', lanes) > MAX_LISTED then
    redis.call('UNLINK', lanes)
    return
  end
  local lengths, sum = redis.call('ZRANGE', lanes, 0, -1, 'WITHSCORES'), 0
  for at = 1, #lengths, 2 do
    if lengths[at] ~= '' then
      sum = sum + read_length(lengths[at + 1])
      has_unknown = has_unknown or not redis.call('ZSCORE', workers, lengths[at])
    end
  end
  if #lengths > 0 then
    redis.call('ZADD', lanes, sum, '')
  end
end

for i = 5, #ARGV do
  redis.call('ZADD', workers, 0, ARGV[i])
  redis.call('PEXPIRE', workers, ARGV[3])
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, most)) do
  moved = moved + retire(name, MAX_MOVED_AT_ONCE - moved)
  local held = redis.pcall('XPENDING', jobs, group, '-', '+', 1, name)
  if held.err then
    redis.call('ZREM', workers, name)
  elseif #held == 0 and drop_lane(name) then
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, name)
    redis.call('ZREM', workers, name)
    removed = removed + 1
  end
end
if ARGV[4] == '1' then
  add_up_lanes()
end
has_unknown = has_unknown or group_at(jobs).consumers > redis.call('ZCARD', workers)
return {removed, has_unknown and 1 or 0, moved}
