-- Fair queueing of a model's prompts, for the scripts that include it. KEYS[1] is the stream of jobs.
--
-- Workers read streams, their lanes and the shared one, in the order of the entries, so what stands there is waited for by
-- everybody behind it. The streams hold some batches only, their capacity; the rest waits in the backlog, a sorted set of
-- digests in the order of their virtual start times, with the jobs in a hash beside it, and moves up as workers take from
-- the streams.
--
-- This is fair queueing. The virtual time is the start time of the prompt that moved up last. A client's first prompt
-- starts one after the virtual time, each further one one later, so clients move up one prompt each in rotation, however
-- many each has queued. "virtual_time" is a sorted set: the virtual time under "" and the start time of each client's last
-- prompt under its reply key, so the difference is how many prompts the client has in the backlog.
--
-- Jobs that yield go behind all that: continuations, whose start times begin at CONTINUED_TIME, and behind these what only bulk
-- clients wait for, from BULK_TIME on. Each kind has a virtual time of its own, under "continued" and "bulk", so clients move up
-- in rotation among their kind. They move up while the streams hold little more than workers compute, held jobs included: a
-- worker takes entries in their order, so it must be able to hold all that stand before a row. In any case one of each kind
-- moves up for TURNS jobs that end: "owed" has what bulk prompts are due so far, and "owed:continued" what continuations are. A
-- prompt that an interactive client joins moves to a start time of that client.
--
-- A continuation counts as the tokens that it may generate: the next prompt of its client starts so much later, and it uses up
-- so many turns. The start time of a client's last continuation is under its reply key and TOKENS.
--
-- Moving through the backlog costs a third of a prompt's time in the server, and as long as one client asks alone it is for
-- nothing. So that client may have more in the streams than their capacity, with the digests; "sole_client" then has its
-- reply key. When another client comes, what is beyond the capacity goes back to the backlog, some of it in each call;
-- meanwhile "sole_client" has the reply key behind a "-". It is empty where the streams have more than their capacity that
-- nobody asked for alone: workers have gone.
--
-- While a script runs, nobody else is served. So each call does a bounded part of what there is to do, whatever is stored,
-- and the next ones do the rest.
--
-- The keys that are not among KEYS carry the model's hash tag, as KEYS[1] does.

-- include capacity
-- include moving

-- How much one call moves up.
local MAX_MOVED, MAX_MOVED_BYTES = 128, 524288
local PART_MOVED, MAX_AT_ONCE = 32, 500
-- The value of "sole_client" when nothing is to be taken back.
local NO_SOLE_CLIENT, UNKNOWN = '', '?'
-- Where the start times of each kind begin and end; those of rows stay below, and the 14 digits that Lua writes are enough.
local CONTINUED_TIME, BULK_TIME, TURNS = 1e11, 1e12, 16
local FIRST_START = {[CONTINUED] = CONTINUED_TIME, [BULK] = BULK_TIME}
local LAST_START = {[CONTINUED] = '(' .. BULK_TIME, [BULK] = '+inf'}
-- Members of "virtual_time"; the virtual time of a kind is under its name.
local NOW, TOKENS = '', ':tokens'
local OWED = {[CONTINUED] = 'owed:continued', [BULK] = 'owed'}
-- How many jobs must end at most until the next turn: those for a continuation of 8,192 tokens.
local MAX_OWED = 8192 * TURNS
-- Bytes of a stored job beyond which its cost is not read when it is cancelled.
local MAX_READ = 65536
local backlog_jobs, virtual_time = base .. ':backlog:jobs', base .. ':virtual_time'

-- What a command counts at a key; a value of another type is removed.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('UNLINK', key)
    return 0
  end
  return count
end

-- The start time of a client's last prompt, or a virtual time; what is no finite number is 0.
local function last_start(client)
  local start = tonumber(redis.call('ZSCORE', virtual_time, client) or 0)
  return start - start == 0 and start or 0
end

local function virtual_now(kind)
  count_at('ZCARD', virtual_time)
  return kind and math.max(FIRST_START[kind], last_start(kind)) or last_start(NOW)
end

-- How many prompts of a kind the backlog has.
local function count_of(kind)
  return redis.call('ZCOUNT', backlog, FIRST_START[kind], LAST_START[kind])
end

-- The member of "virtual_time" that has the start time of a client's last prompt of a kind.
local function member_of(client, kind)
  return kind == CONTINUED and client .. TOKENS or client
end

-- Put jobs into the backlog: start times and digests, and digests and what is stored of their jobs, one after the other.
local function to_backlog(order, stored)
  count_at('HLEN', backlog_jobs)
  for at = 1, #order, MAX_AT_ONCE do
    local last = math.min(#order, at + MAX_AT_ONCE - 1)
    redis.call('ZADD', backlog, unpack(order, at, last))
    redis.call('HSET', backlog_jobs, unpack(stored, at, last))
  end
end

-- What the backlog stores of a job. `cost` is nil, or how many tokens a continuation may generate.
local function to_store(since, lifetime, home, job, cost)
  return since .. (cost and ',' .. cost or '') .. ' ' .. lifetime .. ' ' .. home .. ' ' .. job
end

-- The parts of what `to_store` has made: since, cost or '', lifetime, home, and where the job begins; nothing if it is none.
local function read_stored(stored)
  return string.match(stored or '', '^(%d+),?(%d*) (%d+) (%S*) ()')
end

-- Take the last of `excess` jobs of the streams back into the backlog, with the first start times of the client
-- that queued them: those of bulk clients or those of others, as it is one, or both where nobody knows. The longest lanes give
-- as many each.
-- Returns how many were taken.
local function take_back(excess, client)
  local order, stored, is_bulk, is_known = {}, {}, is_bulk_client(client), client ~= UNKNOWN
  local now, bulk_now = virtual_now(), virtual_now(BULK)
  local function can_go_back(job)
    if not job.digest or job.kind == CONTINUED or is_known and (job.kind == BULK) ~= is_bulk then
      return false
    elseif not job.kind then
      return true
    end
    -- What others have joined stays, for it is not to wait for its turn among what only bulk clients wait for.
    local _, sole = read_waiting(waiting_for .. job.digest)
    return is_bulk_client(sole)
  end
  local function store(taken, seen_before)
    for _, job in ipairs(taken) do
      -- The start times before these are for what is before these in the stream.
      local first = job.kind and bulk_now or now
      order[#order + 1], order[#order + 2] = first + excess - seen_before - job.number, job.digest
      stored[#stored + 1], stored[#stored + 2] = job.digest, to_store(job.since, job.lifetime, job.home, job.job)
      place(waiting_for .. job.digest, LATER, job.lifetime)
    end
  end
  local most = math.min(excess, MAX_MOVED_AT_ONCE)
  local taken, seen = find_to_move(nil, most, true, can_go_back)
  local moved = {{nil, taken}}
  store(taken, 0)
  local workers = longest_lanes()
  for number, worker in ipairs(workers) do
    local part = math.ceil((most - seen) / (#workers - number + 1))
    if part > 0 then
      local more, looked_at = find_to_move(worker, part, true, can_go_back)
      moved[#moved + 1] = {worker, more}
      store(more, seen)
      seen = seen + looked_at
    end
  end
  if #order > 0 then
    to_backlog(order, stored)
    for _, part in ipairs(moved) do
      remove_moved(part[1], part[2])
    end
    -- It may have more in the backlog, which start later.
    redis.call('ZADD', virtual_time, math.max(order[1], last_start(client)), client)
  end
  return #order / 2
end

-- Take back what a client that does not ask alone any more has in the stream beyond the capacity: a part of it.
-- Returns whether there is more.
local function give_way(excess, sole)
  -- A server that is short of memory may have dropped the key: then it was somebody's.
  local client = type(sole) == 'string' and string.gsub(sole, '^-', '') or UNKNOWN
  local taken = take_back(excess, client)
  if taken > 0 and taken < excess then
    redis.call('SET', sole_client, '-' .. client, 'PX', SOLE_CLIENT_MS)
    return true
  elseif is_bulk_client(client) then
    -- Who came may come again: it is not to have so much taken back each time.
    redis.call('SET', sole_client, NO_SOLE_CLIENT, 'PX', BULK_SHY_MS)
  elseif taken == 0 then
    -- What is there stays, and need not be looked at each time.
    redis.call('SET', sole_client, NO_SOLE_CLIENT, 'PX', SOLE_CLIENT_MS)
  else
    redis.call('UNLINK', sole_client)
  end
  return false
end

-- Whether somebody waits. A server that is short of memory may have dropped the key: then until the job's own deadline.
local function is_wanted(waiting, till, now)
  local _, sole = read_waiting(waiting)
  local count = sole and 2 or count_at('HLEN', waiting)
  return count > 1 or count == 0 and now < (tonumber(till) or 0)
end

-- Whether the job of a prompt is still in the queue.
local function is_queued(job, waiting)
  if job == LATER then
    return redis.call('ZSCORE', backlog, string.sub(waiting, -16)) and true or false
  end
  local stream, id = locate(job)
  -- What stands there may be no entry: then there is no such job either.
  return #redis.pcall('XRANGE', stream, id, id) > 0
end

-- Take a prompt out of the backlog; `client` is who had queued it, as far as is known.
local function drop_later(digest, client)
  local start, cost = tonumber(redis.call('ZSCORE', backlog, digest)), nil
  if start then
    redis.call('ZREM', backlog, digest)
    if start >= CONTINUED_TIME and redis.call('HSTRLEN', backlog_jobs, digest) <= MAX_READ then
      cost = select(2, read_stored(redis.call('HGET', backlog_jobs, digest)))
    end
    redis.call('HDEL', backlog_jobs, digest)
    client = member_of(client, start >= CONTINUED_TIME and start < BULK_TIME and CONTINUED or nil)
    if count_at('ZCARD', virtual_time) > 0 and redis.call('ZSCORE', virtual_time, client) then
      redis.call('ZINCRBY', virtual_time, -(tonumber(cost) or 1), client)
    end
  end
end

-- The first prompts of the backlog, or of those of a kind, at most `count`, and as many as one call may move whatever they
-- weigh; they leave it. Returns their digests, what is stored of their jobs, the start time of the last, and how many bytes that
-- is.
local function pop(count, most_bytes, kind)
  local first, bytes = nil, 0
  if kind then
    first =
      redis.call('ZRANGEBYSCORE', backlog, FIRST_START[kind], LAST_START[kind], 'WITHSCORES', 'LIMIT', 0, count)
    local leaving = {}
    for at = 1, #first, 2 do
      leaving[#leaving + 1] = first[at]
    end
    if #leaving > 0 then
      redis.call('ZREM', backlog, unpack(leaving))
    end
  else
    first = redis.call('ZPOPMIN', backlog, count)
  end
  local digests, rest, start = {}, {}, nil
  for at = 1, #first, 2 do
    local size = #rest == 0 and redis.call('HSTRLEN', backlog_jobs, first[at]) or 0
    if #rest > 0 or at > 1 and bytes + size > most_bytes then
      rest[#rest + 1], rest[#rest + 2] = first[at + 1], first[at]
    else
      digests[#digests + 1], start, bytes = first[at], first[at + 1], bytes + size
    end
  end
  if #rest > 0 then
    redis.call('ZADD', backlog, unpack(rest))
  end
  local stored = {}
  if #digests > 0 then
    stored = redis.call('HMGET', backlog_jobs, unpack(digests))
    redis.call('HDEL', backlog_jobs, unpack(digests))
  end
  return digests, stored, start, bytes
end

-- Move prompts up from the backlog, as many as `free`, of so many that are `there`, and no more than `budget` leaves. Those that
-- nobody waits for any more are dropped. Returns how many were added, how many have left the backlog, and how many tokens beyond
-- one each the continuations among those that were added may generate.
local function move_some(free, there, budget, kind)
  local added, left, more_tokens, last, now = 0, 0, 0, nil, now_ms()
  while free > added and there > left and budget.count > 0 and budget.bytes > 0 do
    local count = math.min(free - added, there - left, PART_MOVED)
    local digests, stored, start, size = pop(count, budget.bytes, kind)
    for i, digest in ipairs(digests) do
      local waiting = waiting_for .. digest
      local since, cost, lifetime, home, at = read_stored(stored[i])
      local till = at and since + lifetime
      -- What was taken back has left the backlog, so before its deadline a prompt is waited for.
      if at and (now < till or is_wanted(waiting, till, now)) then
        local job = string.sub(stored[i], at)
        local tag = lifetime .. ' ' .. digest
        place(waiting, add_job(choose(home), kind, 'm', job, 'u', tag, 't', since, 'h', home), lifetime)
        added, more_tokens = added + 1, more_tokens + (tonumber(cost) or 1) - 1
      else
        redis.call('UNLINK', waiting)
      end
    end
    budget.count, budget.bytes, last, left = budget.count - #digests, budget.bytes - size, start, left + #digests
  end
  if last then
    redis.call('ZADD', virtual_time, last, kind or NOW)
  end
  return added, left, more_tokens
end

-- How many prompts of a kind that yields move up now that so many jobs have ended, though others leave them no capacity.
local function take_turns(kind, ended)
  local owed = math.max(-MAX_OWED, last_start(OWED[kind])) + ended
  redis.call('ZADD', virtual_time, owed < 0 and owed or owed % TURNS, OWED[kind])
  return math.max(0, math.floor(owed / TURNS))
end

-- Move prompts up from the backlog while the streams have capacity; `ended` jobs have ended before. Returns whether there may be
-- more to move.
local function move_up(ended)
  local in_backlog = count_at('ZCARD', backlog)
  if in_backlog == 0 then
    return false
  end
  count_at('HLEN', backlog_jobs)
  count_at('ZCARD', virtual_time)
  local free, bulk_free, _, continued_free = spare_capacity(redis.call('XLEN', jobs), in_lanes())
  local sole = bulk_free < 0 and redis.pcall('GET', sole_client)
  if type(sole) == 'string' and string.sub(sole, 1, 1) == '-' then
    local excess = -(is_bulk_client(sole) and bulk_free or free)
    if excess > 0 then
      give_way(excess, sole)
      -- When all of it is back, whoever waits for that moves up.
      return true
    end
  end
  local budget = {count = MAX_MOVED, bytes = MAX_MOVED_BYTES}
  local of_bulk, of_continued = count_of(BULK), count_of(CONTINUED)
  local of_others = in_backlog - of_bulk - of_continued
  local most, by_turns = math.max(0, math.min(free, of_others)), {}
  -- How many of a kind may move up behind those that go before it.
  local function free_of(kind, kind_free, there)
    if there == 0 then
      return 0
    end
    kind_free = kind_free - most
    if kind_free <= 0 then
      kind_free, by_turns[kind] = ended and take_turns(kind, ended) or 0, true
      free = free - kind_free
    end
    most = most + math.min(kind_free, there)
    return kind_free
  end
  continued_free = free_of(CONTINUED, continued_free, of_continued)
  bulk_free = free_of(BULK, bulk_free, of_bulk)
  if most > 0 then
    open_lanes(math.min(most, MAX_MOVED))
    level_lanes(math.min(most, MAX_MOVED))
    local function move_kind(kind, kind_free, there)
      local added, left, more_tokens = move_some(kind_free, there, budget, kind)
      if kind and by_turns[kind] and more_tokens > 0 then
        redis.call('ZINCRBY', virtual_time, -TURNS * more_tokens, OWED[kind])
      end
      return kind_free - added, there - left
    end
    free, of_others = move_kind(nil, free, of_others)
    continued_free, of_continued = move_kind(CONTINUED, continued_free, of_continued)
    bulk_free, of_bulk = move_kind(BULK, bulk_free, of_bulk)
    count_added()
  end
  if of_bulk + of_continued + of_others <= 0 then
    -- No client has anything in the backlog: the virtual time begins again.
    redis.call('UNLINK', virtual_time, backlog_jobs)
    return false
  end
  return free > 0 and of_others > 0 or continued_free > 0 and of_continued > 0 or bulk_free > 0 and of_bulk > 0
end
