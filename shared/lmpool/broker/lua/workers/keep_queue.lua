-- Keep the keys of a model's queue, or a lane, while workers serve the model; replace a stream whose ids are far ahead of the clock.
--
-- KEYS  jobs, then the other keys of the queue; or a lane alone
-- ARGV  consumer group, how far ids may be ahead of the server's clock in ms
--
-- Clients that queue jobs may choose ids, and ids only grow. After the largest id nothing can be added; after any id far ahead no job
-- looks old. The jobs of the replaced stream are dropped, which takes the same time for any number: clients submit them again after a
-- lease, and rows of held jobs reach their clients.
--
-- Returns how many jobs were dropped, -1 if the stream stays.
local jobs, group = KEYS[1], ARGV[1]
for _, key in ipairs(KEYS) do
  -- expire_queue.lua may have given it a lifetime.
  redis.call('PERSIST', key)
end
local latest = redis.call('TIME')[1] * 1000 + ARGV[2]

-- Whether an id in a reply of XINFO is ahead.
local function is_ahead(info, name)
  for at = 1, #info, 2 do
    if info[at] == name then
      return tonumber(string.match(info[at + 1], '^%d+')) > latest
    end
  end
end

local groups, length = redis.pcall('XINFO', 'GROUPS', jobs), redis.pcall('XLEN', jobs)
if groups.err then
  -- If the server has lost the queue, the next worker that reads makes one. The caller handles other errors.
  return string.find(tostring(groups.err), 'no such key', 1, true) and -1 or groups
end
local is_spoilt = false
for _, info in ipairs(groups) do
  is_spoilt = is_spoilt or is_ahead(info, 'last-delivered-id')
end
-- Only XINFO STREAM has the id of an entry that was removed before its delivery. It also returns two entries, which may be large, so
-- it runs on empty streams only: a stream that takes no more jobs is soon empty.
if not is_spoilt and not (length == 0 and is_ahead(redis.call('XINFO', 'STREAM', jobs), 'last-generated-id')) then
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
