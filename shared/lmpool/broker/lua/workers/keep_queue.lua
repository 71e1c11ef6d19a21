-- Keep a model's queue as long as workers serve it: its keys do not expire, and its stream takes jobs. The same of a lane.
--
-- Clients that may queue jobs may choose their ids. After the largest there is, nothing can be added any more; after any other
-- that lies far ahead, all entries have its time, so that none is ever old. Ids only grow, so nothing but a new stream
-- helps. What is in the old one is dropped, not moved: that takes as long however much it is, clients ask again after
-- a lease, and rows of jobs that workers hold reach who waits for them all the same.
--
-- KEYS  jobs, then the other keys of the queue; or a lane alone
-- ARGV  consumer group, how far ids may be ahead of the server's clock in ms
--
-- Returns how many jobs were dropped, -1 when the stream stays.
local jobs, group = KEYS[1], ARGV[1]
for _, key in ipairs(KEYS) do
  -- expire_queue.lua has given it an expiry when nobody served the model.
  redis.call('PERSIST', key)
end
local latest = redis.call('TIME')[1] * 1000 + ARGV[2]
-- Whether an id in a reply of XINFO, names and values one after the other, is ahead.
local function is_ahead(info, name)
  for at = 1, #info, 2 do
    if info[at] == name then
      return tonumber(string.match(info[at + 1], '^%d+')) > latest
    end
  end
end
local groups, length = redis.pcall('XINFO', 'GROUPS', jobs), redis.pcall('XLEN', jobs)
if groups.err then
  -- The server has lost the queue: the worker that reads next makes one. What else it says is for the caller.
  return string.find(tostring(groups.err), 'no such key', 1, true) and -1 or groups
end
local is_spoilt = false
for _, info in ipairs(groups) do
  is_spoilt = is_spoilt or is_ahead(info, 'last-delivered-id')
end
-- Of an entry that was removed before it was delivered only the stream tells, which brings its first and its last entry
-- along: they may be large. Where nothing can be added the stream is empty soon.
if not is_spoilt and not (length == 0 and is_ahead(redis.call('XINFO', 'STREAM', jobs), 'last-generated-id')) then
  return -1
end
-- Who has consumed the old one may have gone with jobs in its lane, which nothing else tells where deadlines are lost.
local consumers = redis.pcall('XINFO', 'CONSUMERS', jobs, group)
redis.call('UNLINK', jobs)
redis.call('XGROUP', 'CREATE', jobs, group, '0', 'MKSTREAM')
for _, consumer in ipairs(consumers) do
  redis.call('XGROUP', 'CREATECONSUMER', jobs, group, consumer[2])
end
return length
