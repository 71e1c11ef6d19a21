-- Keep the keys of a model's queue, or a lane, from expiring while a worker serves the model; replace a stream with ids in the future.
--
-- KEYS  jobs, then the other keys of the queue; or a lane alone
-- ARGV  consumer group, how far ids may be ahead of the server's clock in ms
--
-- Clients that queue jobs may choose ids, and ids only grow: after an id far ahead of the clock, no job looks old. The jobs of a
-- replaced stream are dropped: clients submit them again after a lease, and rows of held jobs still reach their clients.
--
-- Returns the number of dropped jobs; -1 if the stream was not replaced.
local jobs, group = KEYS[1], ARGV[1]
for _, key in ipairs(KEYS) do
  -- The keys have a lifetime if the model had no worker for a while.
  redis.call('PERSIST', key)
end
local infos, length = redis.pcall('XINFO', 'GROUPS', jobs), redis.pcall('XLEN', jobs)
if infos.err then
  -- If the server has lost the stream, the next worker that reads creates it. The caller handles other errors.
  return string.find(tostring(infos.err), 'no such key', 1, true) and -1 or infos
end
-- Only XINFO STREAM has the id of an entry that was removed before its delivery. XINFO STREAM also returns two entries, which may be
-- large, so it runs on empty streams only: a stream that takes no more jobs is soon empty.
infos[#infos + 1] = length == 0 and redis.call('XINFO', 'STREAM', jobs) or nil
local latest, is_spoilt = redis.call('TIME')[1] * 1000 + ARGV[2], false
for _, info in ipairs(infos) do
  for at = 1, #info, 2 do
    if info[at] == 'last-delivered-id' or info[at] == 'last-generated-id' then
      is_spoilt = is_spoilt or tonumber(string.match(info[at + 1], '^%d+')) > latest
    end
  end
end
if not is_spoilt then
  return -1
end
-- Create the consumers again: if the server loses the deadlines, only consumers show which dead workers have lanes.
local consumers = redis.pcall('XINFO', 'CONSUMERS', jobs, group)
redis.call('UNLINK', jobs)
redis.call('XGROUP', 'CREATE', jobs, group, '0', 'MKSTREAM')
for _, consumer in ipairs(consumers) do
  redis.call('XGROUP', 'CREATECONSUMER', jobs, group, consumer[2])
end
return length
