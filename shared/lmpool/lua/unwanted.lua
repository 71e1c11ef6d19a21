-- Remove jobs that a worker holds and that nobody waits for any more: cancelled, or expired with their clients.
--
-- KEYS  jobs, then per job: waiting key
-- ARGV  per job: entry id
--
-- Returns the numbers of the jobs that were removed.
local jobs, removed = KEYS[1], {}
for i = 1, #ARGV do
  if redis.call('HLEN', KEYS[1 + i]) < 2 then
    redis.call('DEL', KEYS[1 + i])
    redis.call('XACK', jobs, 'workers', ARGV[i])
    redis.call('XDEL', jobs, ARGV[i])
    removed[#removed + 1] = i
  end
end
return removed
