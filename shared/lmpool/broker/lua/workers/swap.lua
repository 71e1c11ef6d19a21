-- Set, replace or remove a hash field, but only while it still has the value that the caller saw.
--
-- KEYS  hash
-- ARGV  field, expected value ('' for none), new value ('' removes the field)
--
-- Returns 1 if the field was changed, 0 if the field has another value.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
elseif ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
