-- Remove consumers that hold nothing, and what is known of clients that have nothing in the backlog.
--
-- KEYS  jobs, rooms, turns
-- ARGV  consumer group, then consumers of workers that are gone
--
-- Looked at and removed at once: removing a consumer also drops what it holds, and a worker that only seemed
-- to be gone may take jobs at any moment.
--
-- Returns how many were removed.

-- include queue

local group, removed = ARGV[1], 0
count_at('HLEN', rooms)
if count_at('HLEN', turns) > 1 then
  local now = clock()
  for _, client in ipairs(redis.call('HKEYS', turns)) do
    if client ~= '' and number_at(turns, client) <= now then
      redis.call('HDEL', turns, client)
    end
  end
end
for i = 2, #ARGV do
  local held = redis.pcall('XPENDING', jobs, group, '-', '+', 1, ARGV[i])
  if held.err then
    redis.call('HDEL', rooms, ARGV[i])
  elseif #held == 0 then
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, ARGV[i])
    redis.call('HDEL', rooms, ARGV[i])
    removed = removed + 1
  end
end
return removed
