-- Hand back, at once, the jobs that a worker still holds; what another has taken over is not the worker's any more.
--
-- KEYS  jobs or a lane, reasons
-- ARGV  consumer group, consumer, idle time to give the jobs in ms, most jobs to hand back in this call, where to begin
--       ('-' at first), deliveries a job may have, why the worker ends (or ''), for how long that is kept in ms, most reasons,
--       what follows the ids in the names of entries: '', or of a lane a space and the worker
--
-- The jobs look as if the worker had long been silent, so the worker that claims next takes them. Their deliveries are kept.
-- A job that its claimer will give up gets the reason, if there is one: it ran alone, so it is the one at fault.
--
-- Returns how many were handed back, then where the next call begins ('' when nothing is left).
local stream, reasons = KEYS[1], KEYS[2]
local group, consumer, idle, want = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local held = redis.pcall('XPENDING', stream, group, ARGV[5], '+', want, consumer)
if held.err then
  -- The server has lost the queue.
  return {0, ''}
end
for _, job in ipairs(held) do
  local id, deliveries = job[1], job[4]
  redis.call('XCLAIM', stream, group, consumer, 0, id, 'IDLE', idle, 'JUSTID')
  if ARGV[7] ~= '' and deliveries >= tonumber(ARGV[6]) then
    if redis.call('HLEN', reasons) >= tonumber(ARGV[9]) then
      redis.call('UNLINK', reasons)
    end
    redis.call('HSET', reasons, id .. ARGV[10], ARGV[7])
    redis.call('PEXPIRE', reasons, ARGV[8])
  end
end
return {#held, #held == want and '(' .. held[#held][1] or ''}
