-- Renew the lease of jobs that this worker still holds; jobs that another took over are left alone.
--
-- KEYS  jobs
-- ARGV  consumer group, consumer, then entries
--
-- Returns the entries that are no longer held.

-- include streams

local group, consumer = ARGV[1], ARGV[2]
local MOST = 500
local lost, streams = {}, {}

-- What the worker holds of a stream: ids, as many as are looked at together, and whether these are all. Of a lane that the
-- server has lost, or that was dropped with its worker, it holds nothing: an error here would end the leases of all the rest.
local function held_of(stream)
  local first, known = redis.pcall('XPENDING', stream, group, '-', '+', MOST, consumer), {}
  for _, job in ipairs(first) do
    known[job[1]] = true
  end
  return {known = known, is_all = #first < MOST, kept = {}}
end

for i = 3, #ARGV do
  local stream, id = locate(ARGV[i])
  local held = streams[stream]
  if not held then
    held = held_of(stream)
    streams[stream] = held
  end
  if held.known[id] or not held.is_all and #redis.call('XPENDING', stream, group, id, id, 1, consumer) == 1 then
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
