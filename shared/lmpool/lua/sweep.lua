-- Remove consumers that hold nothing, and what is known of clients that have nothing in the backlog.
--
-- KEYS  jobs, rooms, turns
-- ARGV  consumer group, then consumers of workers that are gone
--
-- Looked at and removed at once: removing a consumer also drops what it holds, and a worker that only seemed
-- to be gone may take jobs at any moment.
--
-- Returns how many were removed.
local jobs, turns, group = KEYS[1], KEYS[3], ARGV[1]
local removed = 0
if redis.call('HLEN', turns) > 1 then
  local clock = tonumber(redis.call('HGET', turns, '') or 0)
  local all = redis.call('HGETALL', turns)
  for i = 1, #all, 2 do
    if all[i] ~= '' and tonumber(all[i + 1]) <= clock then
      redis.call('HDEL', turns, all[i])
    end
  end
end
for i = 2, #ARGV do
  local held = redis.pcall('XPENDING', jobs, group, '-', '+', 1, ARGV[i])
  if held.err then
    redis.call('HDEL', KEYS[2], ARGV[i])
  elseif #held == 0 then
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, ARGV[i])
    redis.call('HDEL', KEYS[2], ARGV[i])
    removed = removed + 1
  end
end
return removed
