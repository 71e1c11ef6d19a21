-- Notifying the clients that wait for prompts, for the scripts that include it. ARGV[3] is the cap of a reply stream, ARGV[4]
-- its lifetime in ms. See names.lua.
--
-- What stands in a waiting key may be anything, and so may what is there as a reply stream: it is passed over or replaced.

local DIGEST, MAX_CLIENTS = 16, 10000
-- Clients that one call notifies: beyond it no more prompts are begun.
local MAX_NOTIFIED = 250
-- Reply key -> digests of one message that it is to get; reply key -> those of another message, which carries something of each
-- of their rows, and that; reply key -> true where a message was added; and how many clients have been gone through.
local done, carrying, carried, notified, seen_clients = {}, {}, {}, {}, 0

-- Whether something else than a stream is there, or one that has come to its last id.
local function is_spoilt(outcome)
  return string.find(outcome.err, 'WRONGTYPE', 1, true) or string.find(outcome.err, 'exhausted', 1, true)
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

-- Have a client get a digest with others in one message, and a part of its row if there is one.
local function gather(reply, digest, part)
  local gathered = part and carrying or done
  local digests = gathered[reply]
  if digests then
    digests[#digests + 1] = digest
    if part then
      local parts = carried[reply]
      parts[#parts + 1] = part
    end
  elseif string.sub(reply, 1, #replies) == replies then
    gathered[reply] = {digest}
    if part then
      carried[reply] = {part}
    end
  end
end

-- Notify the clients that wait for a prompt, or the one that waits alone: of a failure at once, else by `notify_gathered`, which
-- gives them the part of its row that is to be carried: its place in shared memory of a host, or where that is "" all of it.
-- Returns whether all of them have been gone through, and whether there is one on another host.
local function notify_all(waiting, sole, failure, part, host)
  if seen_clients >= MAX_NOTIFIED then
    return false
  end
  local digest, clients, is_whole = string.sub(waiting, -DIGEST), nil, true
  if not sole then
    -- Not HKEYS: there may be any number. Nor HSCAN, which has nothing to show for long where many have been removed.
    clients = redis.pcall('HRANDFIELD', waiting, MAX_NOTIFIED) or {}
    is_whole = #clients < MAX_NOTIFIED
    -- So many clients do not wait for one prompt; if they did, they would find the row by looking.
    if not is_whole and redis.call('HLEN', waiting) > MAX_CLIENTS then
      return true
    end
  elseif not failure and (not part or host == '' or string.sub(sole, -#host) == host) then
    -- Nearly always.
    seen_clients = seen_clients + 1
    gather(sole, digest, part)
    return true
  else
    clients = {'job', sole}
  end
  for _, reply in ipairs(part and host ~= '' and not failure and clients or {}) do
    if string.sub(reply, -#host) ~= host and string.sub(reply, 1, #replies) == replies then
      return false, true
    end
  end
  -- All but the field of the job.
  seen_clients = seen_clients + math.max(0, #clients - 1)
  for _, reply in ipairs(clients) do
    if reply ~= 'job' then
      if not failure then
        gather(reply, digest, part)
      elseif string.sub(reply, 1, #replies) == replies then
        notify(reply, 'd', digest, 'e', failure)
      end
      if not is_whole then
        redis.call('HDEL', waiting, reply)
      end
    end
  end
  return is_whole
end

-- Send what `notify_all` has gathered: parts of rows under a name of their own, and fields and their values beside the digests.
-- Returns how many clients have been notified by this call.
local function notify_gathered(name, ...)
  for reply, digests in pairs(done) do
    notify(reply, 'd', table.concat(digests), ...)
  end
  for reply, digests in pairs(carrying) do
    local parts = table.concat(carried[reply])
    local unread = name == 'v' and (tonumber(redis.pcall('XLEN', reply)) or MAX_WITH_ROWS) or 0
    -- So of a client that does not read there is no more than a few MB.
    if name ~= 'v' or #parts <= MAX_CARRIED and unread < MAX_WITH_ROWS then
      notify(reply, 'd', table.concat(digests), name, parts, ...)
    else
      notify(reply, 'd', table.concat(digests), ...)
    end
  end
  local clients = 0
  for reply in pairs(notified) do
    redis.call('PEXPIRE', reply, ARGV[4])
    clients = clients + 1
  end
  return clients
end
