-- Set deadlines for consumers that have none, because the server has lost the deadlines of the workers.
--
-- KEYS  deadlines of the workers
-- ARGV  lease in ms, lifetime of the key in ms, then consumers

-- include time

local deadline = now_ms() + ARGV[1]
for i = 3, #ARGV do
  redis.call('ZADD', KEYS[1], 'NX', deadline, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
