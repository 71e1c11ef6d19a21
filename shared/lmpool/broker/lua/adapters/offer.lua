-- Ask the workers of a model to load an adapter.
--
-- KEYS  adapters, offers
-- ARGV  fingerprint of the model, name, encoded offer, lifetime of the offer in ms, most names there may be
--
-- Returns 1 when done, 0 when there would be too many names, -1 when the server has lost the model's adapters.
local adapters, offers, name, most = KEYS[1], KEYS[2], ARGV[2], tonumber(ARGV[5])
if redis.call('HGET', adapters, '') ~= ARGV[1] then
  return -1
end
if redis.call('HLEN', offers) > most then
  return 0
end
-- The field '' holds the fingerprint, '@' the generation.
local count = redis.call('HLEN', adapters) - 1 - redis.call('HEXISTS', adapters, '@')
for _, other in ipairs(redis.call('HKEYS', offers)) do
  count = count + 1 - redis.call('HEXISTS', adapters, other)
end
local is_new = redis.call('HEXISTS', adapters, name) == 0 and redis.call('HEXISTS', offers, name) == 0
if is_new and count >= most then
  return 0
end
redis.call('HSET', offers, name, ARGV[3])
if redis.call('PTTL', offers) < tonumber(ARGV[4]) then
  redis.call('PEXPIRE', offers, ARGV[4])
end
return 1
