-- Remove workers that are gone: consumers that hold nothing. And what is known of clients that have nothing in the backlog.
--
-- KEYS  jobs, deadlines of the workers, capacities, virtual time
-- ARGV  consumer group, most workers and most clients to look at, lifetime of the deadlines in ms, then workers that are
--       known to be gone
--
-- Looked at and removed at once: removing a consumer also drops what it holds, and a worker that only seemed
-- to be gone may take jobs at any moment. One that holds jobs stays, so that they can be claimed.
--
-- Returns how many were removed, and whether there are consumers that have no deadline (0|1).

-- include fair_queue

local workers, group, most = KEYS[2], ARGV[1], tonumber(ARGV[2])
local now, removed = now_ms(), 0
count_at('ZCARD', workers)
if count_at('ZCARD', virtual_time) > 1 then
  for _, client in ipairs(redis.call('ZRANGEBYSCORE', virtual_time, '-inf', virtual_now(), 'LIMIT', 0, most)) do
    if client ~= '' then
      redis.call('ZREM', virtual_time, client)
    end
  end
end
for i = 4, #ARGV do
  redis.call('ZADD', workers, 0, ARGV[i])
  redis.call('PEXPIRE', workers, ARGV[3])
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, most)) do
  local size = tonumber(redis.pcall('HGET', capacities, name))
  if size then
    redis.call('HDEL', capacities, name)
    redis.pcall('HINCRBY', capacities, '', -size)
  end
  local held = redis.pcall('XPENDING', jobs, group, '-', '+', 1, name)
  if held.err then
    redis.call('ZREM', workers, name)
  elseif #held == 0 then
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, name)
    redis.call('ZREM', workers, name)
    removed = removed + 1
  end
end
return {removed, of_group('consumers') > redis.call('ZCARD', workers) and 1 or 0}
