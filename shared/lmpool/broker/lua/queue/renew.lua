-- Renew the lease of jobs that this worker still holds; jobs that another took over are left alone.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, then entry ids
--
-- Returns the entry ids that are no longer held.
local jobs, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local MOST = 500
local known, kept, lost = {}, {}, {}
local first = redis.call('XPENDING', jobs, group, '-', '+', MOST, consumer)
for _, job in ipairs(first) do
  known[job[1]] = true
end
for i = 3, #ARGV do
  local id = ARGV[i]
  -- All that it holds have been seen, unless there are more.
  if known[id] or #first == MOST and #redis.call('XPENDING', jobs, group, id, id, 1, consumer) == 1 then
    kept[#kept + 1] = id
  else
    lost[#lost + 1] = id
  end
end
if #kept > 0 then
  kept[#kept + 1] = 'JUSTID'
  redis.call('XCLAIM', jobs, group, consumer, 0, unpack(kept))
end
return lost
