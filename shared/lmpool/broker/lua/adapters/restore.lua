-- Write down all adapters of a model: where there are none, or a server has forgotten changes of them.
--
-- KEYS  adapters, offers, what is there as long as clients may use what the server had before
-- ARGV  fingerprint and generation that the caller saw there ('' for none), the fingerprint of the model, the generation
--       and that in whose place it is put, for how long clients may in ms (0: they know nothing), then per adapter: name,
--       encoded adapter
--
-- Returns 1 when done, 0 when something else is there by now.
local owner = redis.call('HGET', KEYS[1], '') or ''
if owner ~= ARGV[1] or string.match(redis.call('HGET', KEYS[1], '@') or '', '^%S*') ~= ARGV[2] then
  return 0
end
redis.call('UNLINK', KEYS[1])
if owner ~= ARGV[3] then
  redis.call('UNLINK', KEYS[2])
end
redis.call('HSET', KEYS[1], '', ARGV[3], '@', ARGV[4])
for i = 6, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if ARGV[5] ~= '0' then
  redis.call('SET', KEYS[3], '', 'PX', ARGV[5])
end
return 1
