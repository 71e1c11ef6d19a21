-- Register a client for prompts, and queue those that nobody asked for yet.
--
-- KEYS  jobs, reply key of the client, then per prompt: waiting key
--       and, if rows are looked for by "rows", after all of those per prompt: row key
-- ARGV  queue limit, how long the client waits in ms, row check ("rows"|"marks"|""), again (0|1), how many prompts,
--       then per prompt: encoded job
--       and, if the client knows homes, after all of those per prompt: the worker that is its home, or "", or "=" for one
--       that continues the same prompt as the one before
--       and, if all are continuations, after the homes, which may be "", per prompt: how many tokens it may generate
--
-- row check: where to see that a row is in the cache: at the row itself, or at the mark that finish.lua has left of it where
-- rows are on other masters; nowhere when a row is to be replaced.
--
-- again: the caller has waited long; make sure that the job it waits for still exists.
--
-- A client that has much in the backlog leaves places in the queue to others: it may have so much there as SHARE times
-- what is free. So one client alone gets nine tenths of the limit, and a client that comes later always finds some places.
--
-- Returns one character per prompt: Q queued now, J joined a job that exists, F refused because the queue
-- is full, R the row is in the cache (it was stored after the client looked). A "+" behind them asks the caller to call
-- refill.lua until that has nothing more to do: what another client has in the stream is in the way.

-- include names

local reply, lifetime = KEYS[2], ARGV[2]
local row_check, again = ARGV[3], ARGV[4] == '1'
local HEAD = 5
local limit, count = tonumber(ARGV[1]), tonumber(ARGV[5])
local shared, laned = redis.call('XLEN', jobs), tonumber(redis.pcall('ZSCORE', lanes, '')) or 0
-- As in_lanes of streams.lua, without a function.
laned = laned > 0 and laned < 1e9 and laned or 0
local depth = shared + laned

-- Nobody has asked for any of these yet.
local existing = not again and redis.call('EXISTS', backlog, unpack(KEYS, 3))
local may_be_usual = existing == 0 and depth + count <= limit
if may_be_usual and depth == 0 and #ARGV == HEAD + 1 then
  -- One prompt without a home, and nothing to wait for, whoever reads it: its client waits for nothing else, so this goes first.
  redis.call('SET', KEYS[3], reply .. '\n' .. redis.call('XADD', jobs, '*', 'm', ARGV[6], 'u', lifetime), 'PX', lifetime)
  return 'Q'
end

-- include capacity

-- What a bulk client asks for yields to what others ask for, and continuations yield to rows: see fair_queue.lua.
local is_bulk, first_cost = is_bulk_client(reply), HEAD + 2 * count
local is_continued = #ARGV > first_cost
local kind = is_bulk and BULK or is_continued and CONTINUED or nil

-- Whether this client is known to ask alone, and will be for long; `sole` is who does.
local function is_known_alone(sole)
  if sole ~= reply or redis.call('PTTL', sole_client) <= SOLE_CLIENT_MS / 2 then
    return false
  end
  for i = HEAD + 1, HEAD + count do
    if #ARGV[i] > SOLE_MAX_BYTES then
      return false
    end
  end
  return true
end

-- The usual case, before the rules of the queue: making ready for them takes as long as a few prompts. All find a place
-- at once, where this client asks alone or where there are so many.
local sole = may_be_usual and redis.pcall('GET', sole_client)
-- Continuations do not go past the backlog: each would be in the way for as long as it takes.
local is_sole = may_be_usual and not is_continued and depth + count <= SOLE_EXTRA and is_known_alone(sole)
local is_usual = is_sole
if may_be_usual and not is_sole then
  local free, bulk_free, _, continued_free = spare_capacity(shared, laned)
  local free_for_kind = is_bulk and bulk_free or is_continued and continued_free or free
  -- Not where more of a bulk client is in the streams than others are to wait for.
  is_usual = free_for_kind >= count and (is_bulk or bulk_free >= 0 or not is_bulk_client(sole))
end
local outcome, queued = {}, {}

-- include strings

-- The waiting keys of prompts that nobody has asked for, and what they get, one after the other.
local fresh = {}

local function register_fresh()
  if not set_together(fresh, lifetime) then
    for at = 1, #fresh, 2 do
      local waiting = fresh[at]
      redis.call('SET', waiting, fresh[at + 1], 'PX', lifetime)
    end
  end
end

-- What the waiting key of a new prompt has before the entry. See waiting.lua.
local sole_waiter = reply .. '\n'
if is_usual and not has_lanes then
  -- With the digest, where a prompt may have to go back.
  for i = 1, count do
    local waiting = KEYS[2 + i]
    if queued[waiting] then
      outcome[i] = 'J'
    else
      local tag, entry = lifetime, nil
      if is_sole or is_bulk then
        tag = lifetime .. ' ' .. string.sub(waiting, -16)
      end
      if kind then
        entry = redis.call('XADD', jobs, '*', 'm', ARGV[HEAD + i], 'u', tag, 'p', kind)
      else
        entry = redis.call('XADD', jobs, '*', 'm', ARGV[HEAD + i], 'u', tag)
      end
      fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. entry
      outcome[i], queued[waiting] = 'Q', true
    end
  end
  register_fresh()
  return table.concat(outcome)
end

-- include lanes

-- The homes, and which prompts continue the same one as those before them.
local homes, is_sibling = {}, {}
for i = 1, math.min(count, #ARGV - HEAD - count) do
  homes[i] = ARGV[HEAD + count + i]
  if homes[i] == '=' and i > 1 then
    homes[i], is_sibling[i] = homes[i - 1], true
  end
end

-- Register the client for a prompt that it has queued, as the only one, or beside those that have waited for a job that is gone.
local function register(waiting, entry, is_fresh)
  if is_fresh then
    redis.call('SET', waiting, sole_waiter .. entry, 'PX', lifetime)
  else
    redis.call('HSET', waiting, 'job', entry, reply, '')
    redis.call('PEXPIRE', waiting, lifetime)
  end
end

-- Queue a prompt in a lane, with its home, or in the shared stream: with its digest, where it may have to go elsewhere. Returns
-- the entry.
local function to_stream(i, may_go_back, is_announced)
  local waiting, job, home = KEYS[2 + i], ARGV[HEAD + i], homes[i]
  local worker, tag = choose(home, is_announced, is_sibling[i]), lifetime
  if worker or may_go_back or is_bulk then
    tag = lifetime .. ' ' .. string.sub(waiting, -16)
  end
  if home and home ~= '' then
    return add_job(worker, kind, 'm', job, 'u', tag, 'h', home)
  end
  return add_job(worker, kind, 'm', job, 'u', tag)
end

open_lanes(count)
if is_usual then
  local announced, homeless = {}, 0
  for i = 1, count do
    announced[i] = announce(homes[i])
    homeless = homeless + (announced[i] and 0 or 1)
  end
  level_lanes(homeless)
  for i = 1, count do
    local waiting = KEYS[2 + i]
    if queued[waiting] then
      outcome[i] = 'J'
    else
      fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. to_stream(i, is_sole, announced[i])
      outcome[i], queued[waiting] = 'Q', true
    end
  end
  register_fresh()
  count_added()
  return table.concat(outcome)
end
level_lanes(count)

-- include fair_queue

local SHARE = 9
local in_backlog, is_alone, is_in_the_way = count_at('ZCARD', backlog), false, false
-- Behind the prompts of others, too, a call that has only new prompts need not look at each.
local is_new = existing == (in_backlog > 0 and 1 or 0)
local free, bulk_free, more, continued_free = spare_capacity(shared, laned)
local may_be_alone = true
if bulk_free < 0 or is_bulk then
  sole = redis.pcall('GET', sole_client)
  -- Bulk clients give way where they have more than their part, and nobody gives way to them but their like.
  local excess = is_bulk_client(sole) and -bulk_free or is_bulk and 0 or -free
  if sole ~= reply and sole ~= NO_SOLE_CLIENT and excess > 0 then
    is_in_the_way = give_way(excess, sole)
    shared, laned, in_backlog = redis.call('XLEN', jobs), in_lanes(), count_at('ZCARD', backlog)
    free, bulk_free, more, continued_free = spare_capacity(shared, laned)
    depth, may_be_alone = shared + laned, not is_in_the_way
  end
  if is_bulk then
    free, may_be_alone = bulk_free, sole == reply or bulk_free >= 0 and sole ~= NO_SOLE_CLIENT
  end
  if sole ~= reply then
    free = is_in_the_way and 0 or math.max(0, free)
  end
end
if is_continued then
  may_be_alone = false
  free = is_bulk and free or is_in_the_way and 0 or continued_free
end
-- Prompts of the backlog that go before this client's.
local ahead = in_backlog
if in_backlog > 0 and not is_bulk then
  ahead = in_backlog - count_of(BULK) - (is_continued and 0 or count_of(CONTINUED))
end
-- What goes to the backlog, all at once in the end.
local since, order, stored, now, last = nil, {}, {}, nil, nil

-- How many tokens a prompt may generate; 1 for a row.
local function cost_of(i)
  return is_continued and math.max(1, tonumber(ARGV[first_cost + i]) or 1) or 1
end

-- The virtual start time of the client's next prompt.
local function next_start(i)
  if not last then
    now = virtual_now(kind)
    -- The first start times are for those that may have to come back from the stream.
    last = math.max(now - math.min(0, free), last_start(member_of(reply, kind)))
  end
  return last + cost_of(i)
end

local function queue(i, is_fresh)
  local waiting, job = KEYS[2 + i], ARGV[HEAD + i]
  if depth + in_backlog >= limit then
    return 'F'
  end
  if ahead == 0 and (free > 0 or may_be_alone and free + more > 0 and #job <= SOLE_MAX_BYTES) then
    if free <= 0 and not is_alone then
      redis.call('SET', sole_client, reply, 'PX', SOLE_CLIENT_MS)
      is_alone = true
    end
    register(waiting, to_stream(i, free <= 0, false), is_fresh)
    depth, free = depth + 1, free - 1
    return 'Q'
  end
  local start = next_start(i)
  -- How many prompts like this one the client has there.
  if (last - now) / cost_of(i) >= SHARE * (limit - depth - in_backlog) then
    return 'F'
  end
  since = since or string.format('%d', now_ms())
  local digest = string.sub(waiting, -16)
  order[#order + 1], order[#order + 2] = start, digest
  local cost = is_continued and cost_of(i) or nil
  stored[#stored + 1], stored[#stored + 2] = digest, to_store(since, lifetime, homes[i] or '', job, cost)
  last, in_backlog, ahead = start, in_backlog + 1, ahead + 1
  register(waiting, LATER, is_fresh)
  return 'Q'
end

-- A client that joins a prompt of somebody else in the backlog may have an earlier start time for it.
local function hasten(i, digest)
  local start = redis.call('ZSCORE', backlog, digest)
  if start and next_start(i) < tonumber(start) then
    last = next_start(i)
    redis.call('ZADD', backlog, last, digest)
  end
end

-- Have a prompt go on as one of this client, which is no bulk client, where a bulk client has queued it and no worker has it.
local function promote(waiting, entry)
  local stream, id, worker = locate(entry)
  local found = redis.pcall('XRANGE', stream, id, id)[1]
  local job = type(found) == 'table' and read_entry(found, worker and ' ' .. worker or '')
  if not (job and job.kind == BULK and job.digest) or #redis.pcall('XPENDING', stream, GROUP, id, id, 1) > 0 then
    return
  end
  job.id, job.kind = id, kind
  move(worker, worker, {job}, 1, 1, 1)
end

local MAX_REFERENCE = 292

-- Whether the row of a prompt is in the cache, as far as that is to be looked at. One in shared memory of another host, which
-- the client's reply key does not name, is not for this client.
local function is_there(row)
  local size = row_check == 'rows' and redis.pcall('STRLEN', row) or 0
  if type(size) == 'table' then
    -- Something else than a string: nobody could read it, and no row could be stored. A client that may not write rows leaves
    -- it to the worker.
    redis.pcall('UNLINK', row)
    return false
  end
  if size > 0 and size <= MAX_REFERENCE then
    local head = redis.call('GETRANGE', row, 0, 20)
    return string.sub(head, 1, 4) ~= 'LMPS' or string.sub(head, 6, 21) == string.sub(reply, -16)
  end
  return size > 0
end

-- Join a job that exists: J; or R when that has ended with a row, and nothing when there is none.
local function join(i, waiting)
  local job, sole, is_junk = read_waiting(waiting)
  if is_junk then
    redis.call('UNLINK', waiting)
    return nil
  elseif job == DONE then
    return not again and row_check == 'marks' and 'R' or nil
  end
  local is_gone = not job or again and not is_queued(job, waiting)
  if sole and (is_gone or sole ~= reply) then
    expand(waiting, job, sole)
  end
  if is_gone then
    return nil
  end
  if sole ~= reply then
    redis.call('HSET', waiting, reply, '')
  end
  if job == LATER then
    hasten(i, string.sub(waiting, -16))
  elseif sole and not is_bulk and is_bulk_client(sole) then
    promote(waiting, job)
  end
  -- As long as the most patient of those who wait.
  if redis.call('PTTL', waiting) < tonumber(lifetime) then
    redis.call('PEXPIRE', waiting, lifetime)
  end
  return 'J'
end

for i = 1, count do
  local waiting = KEYS[2 + i]
  local is_fresh, result = is_new and not queued[waiting], nil
  if not is_fresh then
    result = is_there(KEYS[2 + count + i]) and 'R' or join(i, waiting)
  end
  outcome[i] = result or queue(i, is_fresh)
  queued[waiting] = true
end
count_added()
if #order > 0 then
  to_backlog(order, stored)
end
if last then
  redis.call('ZADD', virtual_time, last, member_of(reply, kind))
  if not is_in_the_way then
    move_up()
  end
end
return table.concat(outcome) .. (is_in_the_way and '+' or '')
