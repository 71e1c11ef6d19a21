-- Renew the leases of the jobs that a worker still holds.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, then entries
--
-- Returns the entries that the worker no longer holds: another worker took them over, or they were removed.

-- include streams

local group, consumer, lost = ARGV[1], ARGV[2], {}
for i = 3, #ARGV do
  local stream, id = locate(ARGV[i])
  -- Use pcall, because a stream may be lost: an error would end the leases of all other jobs.
  if #redis.pcall('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
