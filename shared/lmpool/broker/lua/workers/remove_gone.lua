-- Remove workers whose deadlines have passed and that hold no jobs, close their lanes, and remove outdated start times of clients.
--
-- KEYS  jobs, deadlines of the workers, capacities, virtual time
-- ARGV  consumer group, max workers and max clients per call, lifetime of the deadlines in ms, whether to add up the lengths of all
--       lanes (0|1), then workers that are known to have ended
--
-- Removing a consumer drops its held jobs, and a worker that only seemed dead may take jobs at any moment, so the check and the
-- removal are one call. Workers with jobs stay, so that the jobs can be claimed.
--
-- Returns the number of removed workers; whether consumers or lanes lack deadlines (0|1); the number of moved jobs (more may be left).

-- include fair_queue

local workers, group, most = KEYS[2], ARGV[1], tonumber(ARGV[2])
-- Max lanes whose lengths are added up. A longer list is invalid and removed; the next heartbeats write the lengths again.
local MAX_LISTED = 5000
local now, removed, has_unknown, moved = now_ms(), 0, false, 0
count_at('ZCARD', workers)

-- Remove the start times of clients whose last prompts of a kind have moved from the backlog to the streams.
for kind in pairs(count_at('ZCARD', virtual_time) > 1 and FROM or {}) do
  for _, client in ipairs(redis.call('ZRANGEBYSCORE', virtual_time, FROM[kind], virtual_now(kind), 'LIMIT', 0, most)) do
    if not FROM[client] and client ~= OWED[CONTINUED] and client ~= OWED[BULK] then
      redis.call('ZREM', virtual_time, client)
    end
  end
end

for i = 5, #ARGV do
  redis.call('ZADD', workers, 0, ARGV[i])
  redis.call('PEXPIRE', workers, ARGV[3])
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, most)) do
  moved = moved + close_lane(name, MAX_MOVED - moved)
  local held = redis.pcall('XPENDING', jobs, group, '-', '+', 1, name)
  if held.err then
    redis.call('ZREM', workers, name)
  elseif #held == 0 and (tonumber(redis.pcall('XLEN', lane_of .. name)) or 0) == 0 then
    redis.call('UNLINK', lane_of .. name)
    count_in_lane(name, -(tonumber(redis.pcall('ZSCORE', lanes, name)) or 0))
    redis.pcall('ZREM', lanes, name)
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, name)
    redis.call('ZREM', workers, name)
    removed = removed + 1
  end
end
if ARGV[4] == '1' and count_at('ZCARD', lanes) > MAX_LISTED then
  redis.call('UNLINK', lanes)
elseif ARGV[4] == '1' then
  -- Correct the sum of the lengths of lanes: the server may have lost keys, or a client may have written to the set. A new shared
  -- stream has no consumers, so a worker without a deadline may have left no other trace than its lane.
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
has_unknown = has_unknown or group_at(jobs).consumers > redis.call('ZCARD', workers)
return {removed, has_unknown and 1 or 0, moved}
