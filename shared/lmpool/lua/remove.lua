-- Take an adapter out of service, and an offer of that name back.
--
-- KEYS  adapters, offers, what is there as long as clients may use another adapter of this name
-- ARGV  name, for how long they may in ms
--
-- Returns 1 when there was one in service, else 0.
local removed = redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('SET', KEYS[3], '', 'PX', ARGV[2])
return removed
