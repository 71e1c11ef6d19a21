-- Keep a model's queue as long as workers serve it: its keys do not expire, and its stream takes jobs.
--
-- Whoever may queue jobs may choose their ids. After the largest there is, nothing can be added any more; after any other
-- that lies far ahead, all entries have its time, so that none is ever old. Ids only grow, so nothing but a new stream
-- helps. What is in the old one is dropped, not moved: that takes as long however much it is, clients ask again after
-- a lease, and rows of jobs that workers hold reach who waits for them all the same.
--
-- KEYS  jobs, then the other keys of the queue
-- ARGV  consumer group, how far ids may be ahead of the server's clock in ms
--
-- Returns how many jobs were dropped, -1 when the stream stays.
local jobs, group = KEYS[1], ARGV[1]
for _, key in ipairs(KEYS) do
  -- Since nobody served the model: see retire.lua.
  redis.call('PERSIST', key)
end
-- It brings the first and the last entry along, which stay here.
local stream = redis.pcall('XINFO', 'STREAM', jobs)
if stream.err then
  -- The server has lost the queue: whoever reads next makes one. What else it says is for the caller.
  return string.find(stream.err, 'no such key', 1, true) and -1 or stream
end
local length, last
for at = 1, #stream, 2 do
  if stream[at] == 'length' then
    length = stream[at + 1]
  elseif stream[at] == 'last-generated-id' then
    last = tonumber(string.match(stream[at + 1], '^%d+'))
  end
end
if last <= redis.call('TIME')[1] * 1000 + ARGV[2] then
  return -1
end
redis.call('UNLINK', jobs)
redis.call('XGROUP', 'CREATE', jobs, group, '0', 'MKSTREAM')
return length
