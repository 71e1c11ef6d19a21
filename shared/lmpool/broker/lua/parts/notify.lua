-- Notify the clients that wait for prompts, by messages in their reply streams; other scripts include this file. Their ARGV[3] is the
-- cap of a reply stream, ARGV[4] its lifetime in ms. Clients may write anything to the keys: invalid values are skipped or replaced.

local DIGEST_SIZE = 16 -- Bytes of a digest.
local MAX_CLIENTS = 10000 -- Max clients that wait for a prompt; a waiting key with more clients is invalid.
local MAX_NOTIFIED = 250 -- A call that has notified this number of clients notifies the clients of no other prompt.
-- By reply key, `plain`: message of digests; `carrying`: message of digests and rows or places; `notified`: true if a message was sent.
local plain, carrying, notified = {}, {}, {}
local seen_clients = 0

-- Whether XADD failed because the key holds no stream, or a stream that has reached the last possible id.
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

-- Add a digest to the client's next message, and `part` unless it is nil: the row, or its place in shared memory.
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

-- Notify the clients of a prompt (`sole` if one waits alone): of a failure at once, of a row by `notify_gathered`. `part` is the row,
-- or its place in the memory of `host`, whose worker has a row server at `address` (or ''). Returns whether all clients were visited,
-- and whether a client on another host cannot read it.
local function notify_all(waiting, sole, failure, part, host, address)
  local needs_host, digest = part and not failure and host ~= '', string.sub(waiting, -DIGEST_SIZE)
  if seen_clients >= MAX_NOTIFIED then
    return false
  elseif sole and not failure and not needs_host then
    seen_clients = seen_clients + 1
    gather(sole, digest, part)
    return true
  end
  -- Use HRANDFIELD: HKEYS could return any number of clients, and HSCAN may return none in many calls.
  local clients = sole and {sole} or redis.pcall('HRANDFIELD', waiting, MAX_NOTIFIED) or {}
  local is_whole = #clients < MAX_NOTIFIED
  if not is_whole and redis.call('HLEN', waiting) > MAX_CLIENTS then
    return true
  end
  for _, reply in ipairs(needs_host and clients or {}) do
    local is_direct = address ~= '' and string.sub(reply, -17, -17) == DIRECT
    if not is_direct and string.sub(reply, -16) ~= host and is_reply_key(reply) then
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

-- Send each client its gathered digests, with rows or places in the field `name`, and the given fields. Clients on other hosts than
-- `host` get the `address` of the row server with places. Returns the number of clients.
local function notify_gathered(name, host, address, ...)
  for reply, message in pairs(plain) do
    notify(reply, 'd', table.concat(message.digests), ...)
  end
  for reply, message in pairs(carrying) do
    local digests, parts = table.concat(message.digests), table.concat(message.parts)
    -- A client that does not read or may not remove messages gets no rows: these would fill the server's memory.
    local unread = name == 'v' and (tonumber(redis.pcall('XLEN', reply)) or MAX_WITH_ROWS) or 0
    if name == 's' and string.sub(reply, -16) ~= host then
      notify(reply, 'd', digests, name, parts, 'a', address, ...)
    elseif name ~= 'v' or #parts <= MAX_CARRIED_BYTES and unread < MAX_WITH_ROWS then
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
