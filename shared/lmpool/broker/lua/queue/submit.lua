-- Register a client for prompts, and queue the prompts that are not queued yet.
--
-- KEYS  jobs, reply key of the client, waiting key of each prompt, and if row check is "rows": row key of each
-- ARGV  queue limit, how long the client waits in ms, row check ("rows", "marks" (of finish.lua) or "": replace the row),
--       again (0|1): check that the jobs still exist, number of prompts, encoded job of each, then optionally the home of each (a
--       worker, "" for none, "=" if it continues the same prompt as the previous one), then for continuations the tokens of each
--
-- Returns one character per prompt: Q queued, J joined an existing job, F refused because the queue is full, R the row is cached.

-- include names

local reply, lifetime = KEYS[2], ARGV[2]
local row_check, again = ARGV[3], ARGV[4] == '1'
local HEAD = 5
local limit, count = tonumber(ARGV[1]), tonumber(ARGV[5])
local existing = again and 1 or redis.call('EXISTS', backlog, unpack(KEYS, 3))
if #ARGV == HEAD + 1 and existing == 0 and limit > 0 and redis.call('XLEN', jobs) == 0
    and (tonumber(redis.pcall('ZSCORE', lanes, '')) or 0) <= 0 then
  -- One new prompt without a home in an empty queue: its client waits for nothing else, so this comes before all other cases.
  redis.call('SET', KEYS[3], reply .. '\n' .. redis.call('XADD', jobs, '*', 'm', ARGV[6], 'u', lifetime), 'PX', lifetime)
  return 'Q'
end

-- include lanes
-- include strings

-- Jobs beyond the capacity for a client that asks alone, and max bytes of each, so that fair_queue.lua can move them back in one
-- call; lifetime of the key that names the client, in ms.
local SOLE_EXTRA, SOLE_MAX_BYTES, SOLE_MS = 1200, 2048, 3600000
local is_bulk, first_cost = is_bulk_client(reply), HEAD + 2 * count
local is_continued = #ARGV > first_cost
local kind = is_bulk and BULK or is_continued and CONTINUED or nil
local depth, sole = redis.call('XLEN', jobs) + in_lanes(), redis.pcall('GET', sole_client)
local are_new = existing == 0 and depth + count <= limit

-- Whether a client that is known to ask alone may add all prompts of this call. Then the script needs no spare_capacity, which
-- takes the server as long as several prompts.
local is_alone = are_new and sole == reply and not kind and depth + count <= SOLE_EXTRA
for i = HEAD + 1, is_alone and HEAD + count or 0 do
  is_alone = is_alone and #ARGV[i] <= SOLE_MAX_BYTES
end
local free_rows, free_bulk, free_continued = 0, 0, 0
if not is_alone then
  free_rows, free_bulk, free_continued = spare_capacity()
end
local free = is_bulk and free_bulk or is_continued and free_continued or free_rows
-- Outcomes; waiting keys and values to set; by waiting key, the outcome of the same prompt later in this call.
local outcome, fresh, is_done, sole_waiter = {}, {}, {}, reply .. '\n'
local homes, is_sibling = {}, {}
for i = 1, math.min(count, #ARGV - HEAD - count) do
  homes[i] = ARGV[HEAD + count + i]
  if homes[i] == '=' and i > 1 then
    homes[i], is_sibling[i] = homes[i - 1], true
  end
end

-- Add a prompt to a stream, with its digest if it may have to move. Returns the entry.
local function to_stream(i, may_go_back, is_announced)
  local job, home, tag = ARGV[HEAD + i], homes[i] or '', lifetime
  local worker = has_lanes and choose(home, is_announced, is_sibling[i]) or nil
  if worker or may_go_back or is_bulk then
    tag = lifetime .. ' ' .. string.sub(KEYS[2 + i], -16)
  end
  if home ~= '' then
    return add_job(worker, kind, 'm', job, 'u', tag, 'h', home)
  elseif worker or kind then
    return add_job(worker, kind, 'm', job, 'u', tag)
  end
  return redis.call('XADD', jobs, '*', 'm', job, 'u', tag)
end

-- Write the waiting keys of new prompts and the lengths of lanes.
local function finish()
  if not set_together(fresh, lifetime) then
    for at = 1, #fresh, 2 do
      local waiting = fresh[at]
      redis.call('SET', waiting, fresh[at + 1], 'PX', lifetime)
    end
  end
  count_added()
end

-- Nearly always all prompts are new and go to the streams. Defining the functions for other cases takes as long as a few prompts.
if are_new then
  if is_alone or free >= count and (is_bulk or free_bulk >= 0 or not is_bulk_client(sole)) then
    local announced, homeless = {}, count
    open_lanes(count)
    for i = 1, has_lanes and count or 0 do
      -- All homes count first, so that the mean is the mean of the whole call.
      announced[i] = announce(homes[i])
      homeless = homeless - (announced[i] and 1 or 0)
    end
    level_lanes(homeless)
    for i = 1, count do
      local waiting = KEYS[2 + i]
      outcome[i] = is_done[waiting] or 'Q'
      if not is_done[waiting] then
        fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. to_stream(i, is_alone, announced[i])
        is_done[waiting] = 'J'
      end
    end
    finish()
    if is_alone and redis.call('PTTL', sole_client) < SOLE_MS / 2 then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
    end
    return table.concat(outcome)
  end
end

-- include fair_queue

-- Prompts in the backlog per free slot that a client may have, so that others always find room; max bytes of a reference to a row.
local SHARE, MAX_REFERENCE = 9, 292

local in_backlog = count_at('ZCARD', backlog)
-- Prompts that are all new need no check each.
local is_new = not again and existing == (in_backlog > 0 and 1 or 0)
if free_bulk < 0 or is_bulk then
  -- A bulk client gives way to all other clients, an interactive client to interactive clients only.
  local excess = is_bulk_client(sole) and -free_bulk or is_bulk and 0 or -free_rows
  if sole ~= reply and sole ~= GAVE_WAY and excess > 0 then
    give_way(excess, sole)
    in_backlog, free_rows, free_bulk, free_continued, depth = count_at('ZCARD', backlog), spare_capacity()
    free = is_bulk and free_bulk or is_continued and free_continued or free_rows
  end
end
if sole ~= reply then
  free = math.max(0, free)
end
-- Jobs beyond the capacity for a client that asks alone. Continuations take too long for that.
local may_be_alone = not is_bulk or sole == reply or free_bulk >= 0 and sole ~= GAVE_WAY
local extra = worker_count > 0 and not is_continued and may_be_alone and SOLE_EXTRA or 0
-- Prompts in the backlog that go before this client's.
local ahead = in_backlog
if ahead > 0 and not is_bulk then
  ahead = in_backlog - count_of(BULK) - (is_continued and 0 or count_of(CONTINUED))
end

-- Start times and stored jobs for the backlog; waiting keys that other clients wait in.
local order, stored, has_others, since, now, last = {}, {}, {}, nil, nil, nil

local function register(waiting, entry)
  if has_others[waiting] then
    redis.call('HSET', waiting, 'job', entry, reply, '')
    redis.call('PEXPIRE', waiting, lifetime)
  else
    fresh[#fresh + 1], fresh[#fresh + 2] = waiting, sole_waiter .. entry
  end
end

-- The tokens that a prompt may generate; 1 for a row.
local function cost_of(i)
  return is_continued and math.max(1, tonumber(ARGV[first_cost + i]) or 1) or 1
end

-- The virtual start time of the client's next prompt. The first start times are for jobs of its own that may have to go back.
local function next_start(i)
  if not last then
    now = virtual_now(kind)
    last = math.max(now - math.min(0, free), start_of(member_of(reply, kind)))
  end
  return last + cost_of(i)
end

local function queue(i)
  local waiting, job = KEYS[2 + i], ARGV[HEAD + i]
  if depth + in_backlog >= limit then
    return 'F'
  end
  if ahead == 0 and (free > 0 or free + extra > 0 and #job <= SOLE_MAX_BYTES) then
    if free <= 0 and not is_alone then
      redis.call('SET', sole_client, reply, 'PX', SOLE_MS)
      is_alone = true
    end
    register(waiting, to_stream(i, free <= 0, false))
    depth, free = depth + 1, free - 1
    return 'Q'
  end
  local start, cost, digest = next_start(i), cost_of(i), string.sub(waiting, -16)
  -- The client's prompts of this cost in the backlog.
  if (last - now) / cost >= SHARE * (limit - depth - in_backlog) then
    return 'F'
  end
  since = since or string.format('%d', now_ms())
  order[#order + 1], order[#order + 2] = start, digest
  stored[#stored + 1] = digest
  stored[#stored + 1] = to_store(since, lifetime, homes[i] or '', job, is_continued and cost or nil)
  last, in_backlog, ahead = start, in_backlog + 1, ahead + 1
  register(waiting, LATER)
  return 'Q'
end

-- A prompt of another client in the backlog moves to the start time of this client, if that is earlier.
local function hasten(i, digest)
  local start = redis.call('ZSCORE', backlog, digest)
  if start and next_start(i) < tonumber(start) then
    last = next_start(i)
    redis.call('ZADD', backlog, last, digest)
  end
end

-- A bulk prompt in a stream that this interactive client joins yields no more, unless a worker has it.
local function promote(entry)
  local stream, id, worker = locate(entry)
  local found = redis.pcall('XRANGE', stream, id, id)[1]
  local job = type(found) == 'table' and read_entry(found, worker and ' ' .. worker or '')
  if job and job.kind == BULK and job.digest and #redis.pcall('XPENDING', stream, GROUP, id, id, 1) == 0 then
    job.kind = kind
    move(worker, worker, {job})
  end
end

-- Whether the row is cached. A row in the shared memory of another host, which the reply key does not name, is not for this client.
local function is_cached(row)
  local size = row_check == 'rows' and redis.pcall('STRLEN', row) or 0
  if type(size) == 'table' then
    -- No row can be stored where something else than a string is. A worker removes it if this client may not.
    redis.pcall('UNLINK', row)
    return false
  end
  if size > 0 and size <= MAX_REFERENCE then
    local head = redis.call('GETRANGE', row, 0, 20)
    return string.sub(head, 1, 4) ~= 'LMPS' or string.sub(head, 6, 21) == string.sub(reply, -16)
  end
  return size > 0
end

-- Join an existing job. Returns J; R if it has just ended with a row; nil if there is no job.
local function join(i, waiting)
  local job, waiter = read_waiting(waiting)
  if job == DONE then
    return not again and row_check == 'marks' and 'R' or nil
  elseif not job then
    return nil
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
    hasten(i, string.sub(waiting, -16))
  elseif waiter and not is_bulk and is_bulk_client(waiter) then
    promote(job)
  end
  -- The key lives as long as the most patient client waits.
  if redis.call('PTTL', waiting) < tonumber(lifetime) then
    redis.call('PEXPIRE', waiting, lifetime)
  end
  return 'J'
end

open_lanes(count)
level_lanes(count)
for i = 1, count do
  local waiting = KEYS[2 + i]
  outcome[i] = is_done[waiting]
  if not outcome[i] then
    outcome[i] = not is_new and (is_cached(KEYS[2 + count + i]) and 'R' or join(i, waiting)) or queue(i)
    is_done[waiting] = outcome[i] == 'Q' and 'J' or outcome[i]
  end
end
finish()
if #order > 0 then
  to_backlog(order, stored)
end
if last then
  redis.call('ZADD', virtual_time, last, member_of(reply, kind))
  move_up()
end
return table.concat(outcome)
