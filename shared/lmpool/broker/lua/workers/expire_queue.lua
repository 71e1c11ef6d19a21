-- Let the queue of a model that no worker serves expire. A worker that returns keeps it: see keep_queue.lua.
--
-- KEYS  the keys of the queue
-- ARGV  lifetime in ms
--
-- Returns how many keys will expire.
local count = 0
for _, key in ipairs(KEYS) do
  count = count + redis.call('PEXPIRE', key, ARGV[1])
end
return count
