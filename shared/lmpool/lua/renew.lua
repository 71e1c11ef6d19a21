-- Renew the lease of jobs that this worker still holds; jobs that another took over are left alone.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, then entry ids
--
-- Returns the entry ids that are no longer held.
local jobs, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', jobs, group, id, id, 1, consumer) == 1 then
    redis.call('XCLAIM', jobs, group, consumer, 0, id, 'JUSTID')
  else
    lost[#lost + 1] = id
  end
end
return lost
