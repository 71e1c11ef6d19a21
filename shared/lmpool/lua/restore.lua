-- Write down all adapters of a model, after a server has lost them or for weights that are new under this name.
--
-- KEYS  adapters, offers
-- ARGV  fingerprint of the model, the fingerprint that is to be there ('' for none),
--       then per adapter: name, encoded adapter
--
-- Returns 1 when done, 0 when somebody was faster.
if (redis.call('HGET', KEYS[1], '') or '') ~= ARGV[2] then
  return 0
end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], '', ARGV[1])
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return 1
