-- Put an adapter that all workers have loaded in service, instead of the one that had its name.
--
-- KEYS  adapters, offers
-- ARGV  fingerprint of the model, name, the offer as the caller saw it, encoded adapter
--
-- Returns 1 when done, 0 when the offer is not there any more or is another.
local adapters, offers, name = KEYS[1], KEYS[2], ARGV[2]
if redis.call('HGET', adapters, '') ~= ARGV[1] or redis.call('HGET', offers, name) ~= ARGV[3] then
  return 0
end
redis.call('HSET', adapters, name, ARGV[4])
redis.call('HDEL', offers, name)
return 1
