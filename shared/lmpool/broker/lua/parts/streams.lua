-- Where entries are, and taking them out, for the scripts that include it. See names.lua.
--
-- A job is an entry of the shared stream of its model, and is named by the entry's id there; or of a worker's lane, and is
-- named by the id in that, a space, and the worker. Of the lanes a sorted set has the lengths, queued and held, and under ""
-- their sum: so who needs the sum need not add it up, and who wants the shortest lane need not look at all of them.

-- include names

-- The stream of an entry, its id there, and the worker of the lane (nil in the shared stream).
local function locate(entry)
  local id, worker = string.match(entry, '^(%S+) (.*)$')
  if id then
    return lane_of .. worker, id, worker
  end
  return jobs, entry, nil
end

-- Have a lane that is known count some more jobs, or less than 0.
local function count_in_lane(worker, more)
  if more ~= 0 and type(redis.pcall('ZADD', lanes, 'XX', 'INCR', more, worker)) == 'string' then
    redis.pcall('ZINCRBY', lanes, more, '')
  end
end

-- Remove entries, held or not. Returns how many there were.
local function remove_entries(entries)
  -- Nearly always all are of one stream; that of the shared one is seen at once.
  if #entries > 0 and not string.find(table.concat(entries), ' ', 1, true) then
    -- XACK alone would leave the entries in the stream's memory for ever.
    redis.pcall('XACK', jobs, GROUP, unpack(entries))
    local count = redis.pcall('XDEL', jobs, unpack(entries))
    return type(count) == 'number' and count or 0
  end
  local streams, workers, removed = {}, {}, 0
  for _, entry in ipairs(entries) do
    local stream, id, worker = locate(entry)
    local ids = streams[stream]
    if not ids then
      ids = {}
      streams[stream], workers[stream] = ids, worker
    end
    ids[#ids + 1] = id
  end
  for stream, ids in pairs(streams) do
    redis.pcall('XACK', stream, GROUP, unpack(ids))
    local count = redis.pcall('XDEL', stream, unpack(ids))
    if type(count) == 'number' then
      removed = removed + count
      if workers[stream] then
        count_in_lane(workers[stream], -count)
      end
    end
  end
  return removed
end
