-- Give consumers that have no deadline one: a server that has lost the deadlines of workers does not know who is alive.
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
