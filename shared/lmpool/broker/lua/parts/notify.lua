-- Notifying the clients that wait for prompts, for the scripts that include it. ARGV[3] is the cap of a reply stream, ARGV[4] its
-- lifetime in ms. Clients may write anything to waiting keys and reply streams: it is skipped or replaced.

-- Bytes of a digest; max clients of a prompt, more are junk; clients after which a call starts no further prompt.
local DIGEST_SIZE, MAX_CLIENTS, MAX_NOTIFIED = 16, 10000, 250
-- By reply key: the message with digests alone; the message that also carries parts of rows; whether the client was notified.
local plain, carrying, notified = {}, {}, {}
local seen_clients = 0

-- Whether XADD failed because of what is there: no stream, or a stream at its last possible id.
local function is_spoilt(outcome)
  return string.find(outcome.err, 'WRONGTYPE', 1, true) or string.find(outcome.err, 'exhausted', 1, true)
end

local function is_reply_key(reply)
  return string.sub(reply, 1, #replies) == replies
end

local function notify(reply, ...)
  local outcome = redis.pcall('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  if type(outcome) == 'table' then
    if is_spoilt(outcome) then
      redis.call('DEL', reply)
    end
    redis.call('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  end
  notified[reply] = true
end

-- Add a digest, and a part of its row if there is one, to the client's next message.
local function gather(reply, digest, part)
  local messages = part and carrying or plain
  local message = messages[reply]
  if not message then
    if not is_reply_key(reply) then
      return
    end
    message = {digests = {}, parts = {}}
    messages[reply] = message
  end
  message.digests[#message.digests + 1], message.parts[#message.parts + 1] = digest, part
end

-- Notify the clients of a prompt, or the one that waits alone: of a failure now, otherwise by `notify_gathered`. `part` is the row, or
-- its place in the memory of `host`. Returns whether all were visited, and whether one is on another host and cannot read the row.
local function notify_all(waiting, sole, failure, part, host)
  local needs_host, digest = part and not failure and host ~= '', string.sub(waiting, -DIGEST_SIZE)
  if seen_clients >= MAX_NOTIFIED then
    return false
  elseif sole and not failure and not needs_host then
    seen_clients = seen_clients + 1
    gather(sole, digest, part)
    return true
  end
  -- Neither HKEYS, because there may be any number of clients, nor HSCAN, which may return nothing for long.
  local clients = sole and {sole} or redis.pcall('HRANDFIELD', waiting, MAX_NOTIFIED) or {}
  local is_whole = #clients < MAX_NOTIFIED
  if not is_whole and redis.call('HLEN', waiting) > MAX_CLIENTS then
    return true
  end
  for _, reply in ipairs(needs_host and clients or {}) do
    if string.sub(reply, -#host) ~= host and is_reply_key(reply) then
      return false, true
    end
  end
  for _, reply in ipairs(clients) do
    if reply ~= 'job' then
      seen_clients = seen_clients + 1
      if not failure then
        gather(reply, digest, part)
      elseif is_reply_key(reply) then
        notify(reply, 'd', digest, 'e', failure)
      end
      if not is_whole then
        redis.call('HDEL', waiting, reply)
      end
    end
  end
  return is_whole
end

-- Send the gathered messages: parts of rows in the field `name`, then the given fields. Returns how many clients were notified.
local function notify_gathered(name, ...)
  for reply, message in pairs(plain) do
    notify(reply, 'd', table.concat(message.digests), ...)
  end
  for reply, message in pairs(carrying) do
    local digests, parts = table.concat(message.digests), table.concat(message.parts)
    -- A client that does not read, or may not remove what it has read, must not fill the server's memory with rows.
    local unread = name == 'v' and (tonumber(redis.pcall('XLEN', reply)) or MAX_WITH_ROWS) or 0
    if name ~= 'v' or #parts <= MAX_CARRIED_BYTES and unread < MAX_WITH_ROWS then
      notify(reply, 'd', digests, name, parts, ...)
    else
      notify(reply, 'd', digests, ...)
    end
  end
  local clients = 0
  for reply in pairs(notified) do
    redis.call('PEXPIRE', reply, ARGV[4])
    clients = clients + 1
  end
  return clients
end
