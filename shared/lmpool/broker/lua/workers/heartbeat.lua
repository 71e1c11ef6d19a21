-- Write a heartbeat with its expiry at once: without one it would outlive its worker.
--
-- KEYS  heartbeat
-- ARGV  lifetime in ms, then per field: name, value
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
