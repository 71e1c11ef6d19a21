-- End jobs, with a row in the cache or with a failure, and tell the clients that wait.
--
-- KEYS  jobs, dead, then per job: waiting key,
--       and, to have it checked that rows are stored, after all of those per job: row key
-- ARGV  consumer group, fingerprint, cap of a reply stream, lifetime of a reply stream in ms,
--       cap of the dead stream, then per job: entry id, failure (encoded, or '' when the row is stored),
--       dead (0|1), and with row keys at the end: the failure of a row that is not stored
--
-- The digest is the last 16 bytes of the waiting key. The reply keys were registered by submit.lua and
-- carry the model's hash tag, like every key here.
--
-- Returns how many clients were told.
local DIGEST, HEAD = 16, 5
local jobs, dead = KEYS[1], KEYS[2]
local group, fingerprint = ARGV[1], ARGV[2]
local count = math.floor((#ARGV - HEAD) / 3)
local entries, done, told = {}, {}, {}
local function tell(reply, ...)
  redis.call('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  told[reply] = true
end
for i = 1, count do
  local waiting, row = KEYS[2 + i], KEYS[2 + count + i]
  local digest, at = string.sub(waiting, -DIGEST), HEAD + 3 * (i - 1)
  local entry, failure = ARGV[at + 1], ARGV[at + 2]
  entries[i] = entry
  if row and failure == '' and redis.call('EXISTS', row) == 0 then
    failure = ARGV[#ARGV]
  end
  if ARGV[at + 3] == '1' then
    local found = redis.call('XRANGE', jobs, entry, entry)
    if #found == 1 then
      redis.call('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(found[1][2]))
    end
  end
  for _, reply in ipairs(redis.call('HKEYS', waiting)) do
    if reply ~= 'job' then
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
  redis.call('DEL', waiting)
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
redis.call('XACK', jobs, group, unpack(entries))
redis.call('XDEL', jobs, unpack(entries))
return clients
