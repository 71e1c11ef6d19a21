-- Put an adapter that all workers have loaded in service, instead of the one that had its name.
--
-- KEYS  adapters, offers, what is there as long as clients may use another adapter of this name
-- ARGV  fingerprint of the model, name, the offer as the caller saw it, encoded adapter, for how long they may in ms
--
-- Returns 1 when done, 0 when the offer is not there any more or is another.
local adapters, offers, name = KEYS[1], KEYS[2], ARGV[2]
if redis.call('HGET', adapters, '') ~= ARGV[1] or redis.call('HGET', offers, name) ~= ARGV[3] then
  return 0
end
local before = redis.call('HGET', adapters, name)
if before and before ~= ARGV[4] then
  redis.call('SET', KEYS[3], '', 'PX', ARGV[5])
end
redis.call('HSET', adapters, name, ARGV[4])
redis.call('HDEL', offers, name)
return 1
