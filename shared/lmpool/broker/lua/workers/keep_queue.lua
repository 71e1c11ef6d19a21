-- Keep the keys of a model's queue, or a lane, while workers serve the model; replace a stream whose ids are far ahead of the clock.
--
-- KEYS  jobs, then the other keys of the queue; or a lane alone
-- ARGV  consumer group, how far ids may be ahead of the server's clock in ms
--
-- Clients that queue jobs may choose ids, and ids only grow: after an id far ahead no job looks old. The jobs of the replaced stream
-- are dropped: clients submit them again after a lease, and rows of held jobs reach their clients.
--
-- Returns how many jobs were dropped, -1 if the stream stays.
local jobs, group = KEYS[1], ARGV[1]
for _, key in ipairs(KEYS) do
  -- The model may have had no worker: then its keys have a lifetime.
  redis.call('PERSIST', key)
end
local infos, length = redis.pcall('XINFO', 'GROUPS', jobs), redis.pcall('XLEN', jobs)
if infos.err then
  -- If the server has lost the queue, the next worker that reads makes one. The caller handles other errors.
  return string.find(tostring(infos.err), 'no such key', 1, true) and -1 or infos
end
-- Only XINFO STREAM has the id of an entry that was removed before its delivery. It also returns two entries, which may be large, so
-- it runs on empty streams only: a stream that takes no more jobs is soon empty.
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
-- Consumers must survive: if deadlines are lost, only they lead to the lanes of dead workers.
local consumers = redis.pcall('XINFO', 'CONSUMERS', jobs, group)
redis.call('UNLINK', jobs)
redis.call('XGROUP', 'CREATE', jobs, group, '0', 'MKSTREAM')
for _, consumer in ipairs(consumers) do
  redis.call('XGROUP', 'CREATECONSUMER', jobs, group, consumer[2])
end
return length
