-- Remove consumers that hold nothing.
--
-- KEYS  jobs
-- ARGV  consumer group, then consumers of workers that are gone
--
-- Looked at and removed at once: removing a consumer also drops what it holds, and a worker that only seemed
-- to be gone may take jobs at any moment.
--
-- Returns how many were removed.
local jobs, group = KEYS[1], ARGV[1]
local removed = 0
for i = 2, #ARGV do
  if #redis.call('XPENDING', jobs, group, '-', '+', 1, ARGV[i]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', jobs, group, ARGV[i])
    removed = removed + 1
  end
end
return removed
