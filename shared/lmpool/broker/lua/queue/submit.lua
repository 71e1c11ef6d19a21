-- Register a client for prompts, and queue the prompts that are not queued yet.
--
-- KEYS  jobs, reply key of the client, waiting key of each prompt, and if row check is "rows": row key of each
-- ARGV  queue limit, how long the client waits in ms, row check ("rows", "marks" (of finish.lua) or "": replace the row),
--       again (0|1): check that the jobs still exist, number of prompts, encoded job of each, then optionally the home of each (a
--       worker, "" for none, "=" if it continues the same prompt as the previous one), then for continuations the tokens of each
--
-- Returns one character per prompt: Q queued, J joined an existing job, F refused because the queue is full, R the row is cached.

-- include names

local reply, lifetime, row_check, again = KEYS[2], ARGV[2], ARGV[3], ARGV[4] == '1'
local HEAD, limit, count = 5, tonumber(ARGV[1]), tonumber(ARGV[5])
local sole_waiter = reply .. '\n'
local existing = again and 1 or redis.call('EXISTS', backlog, unpack(KEYS, 3))
local depth = redis.call('XLEN', jobs) + math.max(0, tonumber(redis.pcall('ZSCORE', lanes, '')) or 0)
if #ARGV == HEAD + 1 and existing == 0 and limit > 0 and depth == 0 then
  -- One new prompt without a home in an empty queue: its client waits for nothing else, so this comes before all other cases.
  redis.call('SET', KEYS[3], sole_waiter .. redis.call('XADD', jobs, '*', 'm', ARGV[6], 'u', lifetime), 'PX', lifetime)
  return 'Q'
end

-- include strings

-- Jobs beyond the capacity for a client that asks alone, and max bytes of each, so that fair_queue.lua can move them back in one
-- call; lifetime of the key that names the client, in ms; batches that may wait for one worker without a check of the backlog.
local SOLE_EXTRA, SOLE_MAX_BYTES, SOLE_MS, SPARE_BATCHES = 1200, 2048, 3600000, 2
local is_bulk, sole = string.find(reply, bulk_replies, 1, true) ~= nil, redis.pcall('GET', sole_client)
-- Outcomes; waiting keys and values to set; by waiting key, the outcome of the same prompt later in this call.
local outcome, fresh, is_done = {}, {}, {}

local function set_fresh()
  if not set_together(fresh, lifetime) then
    for at = 1, #fresh, 2 do
      local waiting = fresh[at]
      redis.call('SET', waiting, fresh[at + 1], 'PX', lifetime)
    end
  end
end

-- Nearly always all prompts are new, without homes, and fit into the stream of a single worker (its capacity, and the sum).
-- Defining the functions for other cases takes as long as a few prompts.
if existing == 0 and #ARGV == HEAD + count and redis.pcall('HLEN', capacities) == 2 then
  local is_alone = sole == reply and not is_bulk
  local most = is_alone and SOLE_EXTRA or SPARE_BATCHES * (tonumber(redis.pcall('HGET', capacities, '')) or 0)
  local fits = depth + count <= math.min(limit, most)
  for i = HEAD + 1, fits and is_alone and #ARGV or 0 do
    fits = fits and #ARGV[i] <= SOLE_MAX_BYTES
  end
  local priority = is_bulk and {'p', BULK} or {}
  for i = 1, fits and count or 0 do
    local waiting, tag = KEYS[2 + i], lifetime
    outcome[i] = is_done[waiting] or 'Q'
    if not is_done[waiting] then
      if is_alone or is_bulk then
        tag = lifetime .. ' ' .. string.sub(waiting, -16)
      end
      fresh[#fresh + 1] = waiting
      fresh[#fresh + 1] = sole_waiter .. redis.call('XADD', jobs, '*', 'm', ARGV[HEAD + i], 'u', tag, unpack(priority))
      is_done[waiting] = 'J'
    end
  end
  if fits then
    set_fresh()
    if is_alone and redis.call('PTTL', sole_client) < SOLE_MS / 2 then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
    end
    return table.concat(outcome)
  end
end

-- include fair_queue

-- Prompts in the backlog per free slot that a client may have, so that others always find room.
local SHARE = 9
local first_cost = HEAD + 2 * count
local is_continued = #ARGV > first_cost
local kind = is_bulk and BULK or is_continued and CONTINUED or nil
-- The member of "virtual_time" with the start time of the client's last prompt of this kind.
local member = kind == CONTINUED and reply .. TOKENS or reply
local homes, is_sibling = {}, {}
for i = 1, math.min(count, #ARGV - HEAD - count) do
  homes[i] = ARGV[HEAD + count + i]
  if homes[i] == '=' and i > 1 then
    homes[i], is_sibling[i] = homes[i - 1], true
  end
end
local in_backlog, spare = count_at('ZCARD', backlog), nil
-- Prompts that are all new need no check each.
local is_new = not again and existing == (in_backlog > 0 and 1 or 0)
spare, depth = spare_capacity()
if spare[BULK] < 0 or is_bulk then
  -- A bulk client gives way to all other clients, an interactive client to interactive clients only.
  local excess = is_bulk_client(sole) and -spare[BULK] or is_bulk and 0 or -spare[ROWS]
  if sole ~= reply and sole ~= GAVE_WAY and excess > 0 then
    give_way(excess, sole)
    in_backlog, spare, depth = count_at('ZCARD', backlog), spare_capacity()
  end
end
local free = sole == reply and spare[kind or ROWS] or math.max(0, spare[kind or ROWS])
-- Jobs beyond the capacity for a client that asks alone. Continuations take too long for that.
local may_be_alone = not is_bulk or sole == reply or spare[BULK] >= 0 and sole ~= GAVE_WAY
local extra = worker_count > 0 and not is_continued and may_be_alone and SOLE_EXTRA or 0
-- Prompts in the backlog that go before this client's.
local ahead = in_backlog
if ahead > 0 and not is_bulk then
  ahead = in_backlog - count_of(BULK) - (is_continued and 0 or count_of(CONTINUED))
end
local announced = open_lanes(count, is_new and ahead == 0 and free + extra >= count and homes or {})
-- Start times and stored jobs for the backlog; waiting keys that other clients wait in.
local order, stored, has_others, is_named, now, last = {}, {}, {}, false, nil, nil

-- The virtual start time of the client's next prompt, and the tokens that it may generate (1 for a row). The first start times are for
-- jobs of its own that may have to go back.
local function next_start(i)
  if not last then
    now = virtual_now(kind)
    last = math.max(now - math.min(0, free), start_of(member))
  end
  local cost = is_continued and math.max(1, tonumber(ARGV[first_cost + i]) or 1) or 1
  return last + cost, cost
end

local function queue(i)
  local waiting, job, home, entry = KEYS[2 + i], ARGV[HEAD + i], homes[i] or '', LATER
  local digest = string.sub(waiting, -16)
  if depth + in_backlog >= limit then
    return 'F'
  elseif ahead == 0 and (free > 0 or free + extra > 0 and #job <= SOLE_MAX_BYTES) then
    local worker, tag = choose(home, announced[i], is_sibling[i]), lifetime
    if free <= 0 and not is_named then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
      is_named = true
    end
    if worker or free <= 0 or is_bulk then
      -- It may have to move.
      tag = lifetime .. ' ' .. digest
    end
    if home ~= '' then
      entry = add_job(worker, kind, 'm', job, 'u', tag, 'h', home)
    else
      entry = add_job(worker, kind, 'm', job, 'u', tag)
    end
    depth, free = depth + 1, free - 1
  else
    local start, cost = next_start(i)
    -- The client's prompts of this cost in the backlog.
    if (last - now) / cost >= SHARE * (limit - depth - in_backlog) then
      return 'F'
    end
    order[#order + 1], order[#order + 2] = start, digest
    stored[#stored + 1] = digest
    stored[#stored + 1] = to_store(string.format('%d', now_ms()), lifetime, home, job, is_continued and cost or nil)
    last, in_backlog, ahead = start, in_backlog + 1, ahead + 1
  end
  if has_others[waiting] then
    redis.call('HSET', waiting, 'job', entry, reply, '')
    redis.call('PEXPIRE', waiting, lifetime)
  else
    fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. entry
  end
  return 'Q'
end

-- A bulk prompt in a stream that this interactive client joins yields no more, unless a worker has it.
local function promote(entry)
  local stream, id, worker = locate(entry)
  local found = redis.pcall('XRANGE', stream, id, id)[1]
  local job = type(found) == 'table' and read_entry(found, worker and ' ' .. worker or '')
  if job and job.kind == BULK and job.digest and #redis.pcall('XPENDING', stream, GROUP, id, id, 1) == 0 then
    job.kind = kind
    move(worker, {job})
  end
end

-- Whether the row is cached. A row in the shared memory of another host, which the reply key does not name, is not for this client.
local function is_cached(row)
  local head = row_check == 'rows' and redis.pcall('GETRANGE', row, 0, 20) or ''
  if type(head) == 'table' then
    -- No row can be stored where something else than a string is. A worker removes it if this client may not.
    redis.pcall('UNLINK', row)
    return false
  end
  return head ~= '' and (string.sub(head, 1, 4) ~= 'LMPS' or string.sub(head, 6, 21) == string.sub(reply, -16))
end

-- Join an existing job. Returns J; R if it has just ended with a row; nil if there is no job.
local function join(i, waiting)
  local job, waiter = read_waiting(waiting)
  if not job or job == DONE then
    return job and not again and row_check == 'marks' and 'R' or nil
  end
  if waiter and waiter ~= reply then
    expand(waiting, job, waiter)
  end
  if again and not is_queued(job, waiting) then
    has_others[waiting] = waiter ~= reply
    return nil
  end
  if waiter ~= reply then
    redis.call('HSET', waiting, reply, '')
  end
  if job == LATER then
    -- A prompt of another client in the backlog moves to the start time of this client, if that is earlier.
    local digest = string.sub(waiting, -16)
    local start = tonumber(redis.call('ZSCORE', backlog, digest))
    if start and next_start(i) < start then
      last = next_start(i)
      redis.call('ZADD', backlog, last, digest)
    end
  elseif waiter and not is_bulk and is_bulk_client(waiter) then
    promote(job)
  end
  -- The key lives as long as the most patient client waits.
  if redis.call('PTTL', waiting) < tonumber(lifetime) then
    redis.call('PEXPIRE', waiting, lifetime)
  end
  return 'J'
end

for i = 1, count do
  local waiting = KEYS[2 + i]
  outcome[i] = is_done[waiting]
  if not outcome[i] then
    outcome[i] = not is_new and (is_cached(KEYS[2 + count + i]) and 'R' or join(i, waiting)) or queue(i)
    is_done[waiting] = outcome[i] == 'Q' and 'J' or outcome[i]
  end
end
set_fresh()
count_added()
if #order > 0 then
  to_backlog(order, stored)
end
if last then
  redis.call('ZADD', virtual_time, last, member)
  move_up()
end
return table.concat(outcome)
