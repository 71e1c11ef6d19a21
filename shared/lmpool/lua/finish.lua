-- End jobs, with a row in the cache or with a failure, and tell the clients that wait.
--
-- KEYS  jobs, dead, then per job: waiting key,
--       and, to have jobs left alone whose rows are not there, after all of those per job: row key
-- ARGV  consumer group, fingerprint, cap of a reply stream, lifetime of a reply stream in ms,
--       cap of the dead stream, consumer, then per job: entry id, failure (encoded, or '' when the row is stored),
--       dead (0|1)
--
-- The digest is the last 16 bytes of the waiting key. The reply keys were registered by submit.lua and
-- carry the model's hash tag, like every key here.
--
-- A row that was just stored can be missing: the server refused it, or had to evict it at once. Such a job
-- stays as it is, for the worker to store the row again.
--
-- A job that failed is left to whoever holds it now, when that is not the caller: a worker that was silent for a lease has
-- no say any more in whether a prompt can be answered. A row is a row, whoever brings it.
--
-- Returns how many clients were told, then the numbers of the jobs that were left alone, with spaces between.
local DIGEST, HEAD = 16, 6
local jobs, dead = KEYS[1], KEYS[2]
local group, fingerprint = ARGV[1], ARGV[2]
local count = math.floor((#ARGV - HEAD) / 3)
local entries, done, told, left = {}, {}, {}, {}
local function tell(reply, ...)
  redis.call('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  told[reply] = true
end
local function holds(entry)
  local found = redis.pcall('XPENDING', jobs, group, entry, entry, 1, ARGV[6])
  return not found.err and #found == 1
end
for i = 1, count do
  local waiting, row = KEYS[2 + i], KEYS[2 + count + i]
  local digest, at = string.sub(waiting, -DIGEST), HEAD + 3 * (i - 1)
  local entry, failure = ARGV[at + 1], ARGV[at + 2]
  local is_left = row and failure == '' and redis.call('EXISTS', row) == 0
  local is_ended = not is_left and (failure == '' or holds(entry))
  if is_left then
    left[#left + 1] = i
  elseif is_ended then
    entries[#entries + 1] = entry
  end
  if is_ended and ARGV[at + 3] == '1' then
    local found = redis.call('XRANGE', jobs, entry, entry)
    if #found == 1 then
      redis.call('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(found[1][2]))
    end
  end
  for _, reply in ipairs(is_ended and redis.call('HKEYS', waiting) or {}) do
    if reply ~= 'job' and reply ~= 'keep' then
      if failure ~= '' then
        tell(reply, 'd', digest, 'e', failure)
      else
        local digests = done[reply]
        if not digests then
          digests = {}
          done[reply] = digests
        end
        digests[#digests + 1] = digest
      end
    end
  end
  if is_ended then
    redis.call('DEL', waiting)
  end
end
for reply, digests in pairs(done) do
  tell(reply, 'd', table.concat(digests), 'f', fingerprint)
end
local clients = 0
for reply in pairs(told) do
  redis.call('PEXPIRE', reply, ARGV[4])
  clients = clients + 1
end
-- XACK alone would leave the entries in the stream's memory for ever.
if #entries > 0 then
  redis.call('XACK', jobs, group, unpack(entries))
  redis.call('XDEL', jobs, unpack(entries))
end
table.insert(left, 1, clients)
return table.concat(left, ' ')
