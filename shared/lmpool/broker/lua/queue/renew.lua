-- Renew the leases of the jobs that a worker still holds.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, then entries
--
-- Returns the entries that another worker took over, or that were removed.

-- include streams

local group, consumer = ARGV[1], ARGV[2]
-- Max held jobs of a stream that one command reads; further jobs are looked up one by one.
local MAX_LISTED = 500
local lost, streams = {}, {}

-- The ids that the worker holds of a stream, and whether the list is complete. A stream that the server has lost has none: an
-- error would end the leases of all other jobs.
local function held_of(stream)
  local first, ids = redis.pcall('XPENDING', stream, group, '-', '+', MAX_LISTED, consumer), {}
  for _, job in ipairs(first) do
    ids[job[1]] = true
  end
  return {ids = ids, is_complete = #first < MAX_LISTED, kept = {}}
end

for i = 3, #ARGV do
  local stream, id = locate(ARGV[i])
  local held = streams[stream] or held_of(stream)
  streams[stream] = held
  if held.ids[id] or not held.is_complete and #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
    held.kept[#held.kept + 1] = id
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for stream, held in pairs(streams) do
  if #held.kept > 0 then
    held.kept[#held.kept + 1] = 'JUSTID'
    redis.call('XCLAIM', stream, group, consumer, 0, unpack(held.kept))
  end
end
return lost
