-- Write a worker's heartbeat and its lifetime in one call: a heartbeat without a lifetime would outlive its worker.
--
-- KEYS  heartbeat
-- ARGV  lifetime in ms, then per field: name, value
--
-- Returns the number of fields that the heartbeat did not have: all fields if it had expired.
local added = redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return added
