---- MODULE Lanes ----
(* Model of a queue whose workers each have a stream (lane): the scripts in `lua/queue` and `lua/workers`, and callers.

   One action is one call of a script, or a step of a process between two calls.

   entries   entries of the streams and the backlog. "p": prompt; "at": the lane's worker, the shared stream or the
             backlog; "n": the entry's number there, so (p, n, at) is its id; "by": the worker that holds the entry
             in the list of pending entries; "d": deliveries that the server has counted; "t": deliveries for
             computation since the prompt was queued
   waiting   the key `waiting:` of each prompt: its job, and the clients that are notified of its end
   rows      prompts whose rows are cached; "dead": the dead letters
   mode      state of a worker: "out" (not started), "runs", "drains" (after SIGTERM), "gone" (it left, or was killed)
   nap       whether a worker is frozen, or has been frozen
   held      entries that each worker computes; "spent": the worker must give up the prompt instead
   deadline  state of a worker's deadline in the sorted set `workers`: "none", "lives", "passed"
   known     consumers of the shared stream: all workers that may have left entries; the server never evicts them,
             and lost deadlines are restored from them
   count     the hash `capacity` and the sorted set `lanes` together: the listed lanes and their lengths
   client    state of each caller: "idle" (no request), "waits", "told" (of a row), "failed" (told of an error),
             "ends" (it has its row or its error, or has given up)

   The model has no time: a lease may pass at any moment at which its worker does not run, and a steal needs an owner
   that is busy or frozen.  The model has no order within a lane or the backlog, may place a prompt in any open lane,
   and omits requeued entries, clearing, and the limits of one call.  Fairness (WF) applies to all steps together: if a
   step is possible, then a step happens. *)
EXTENDS Integers, FiniteSets, TLC
CONSTANTS
    Workers, Clients, Prompts,
    Steady,     \* workers that never end, but may be frozen for a while
    Late,       \* workers that start later
    MaxAsks,    \* max requests of all clients together
    MaxHeld,    \* max prompts that a worker holds; it computes one at a time
    Capacity,   \* max undelivered entries in streams
    Faults,     \* kinds of faults that may happen
    MaxFaults,  \* max number of faults
    Drains,     \* whether workers may begin to drain
    Break       \* name of the broken rule; "" if no rule is broken
VARIABLES entries, waiting, rows, dead, mode, nap, held, deadline, known, count, client, faults
vars == <<entries, waiting, rows, dead, mode, nap, held, deadline, known, count, client, faults>>
workers == <<mode, nap, held, deadline, known>>

Nobody == "nobody"
Shared == "shared"
Backlog == "backlog"
Keep == "keep"
Unlisted == 99
MaxDeliveries == 3
NoJob == [n |-> 0, at |-> "nowhere"]
Absent == [job |-> NoJob, told |-> {}]
Symmetry == Permutations(Clients) \cup Permutations(Prompts) \cup Permutations(Workers \ (Steady \cup Late))

Init ==
    /\ entries = {} /\ waiting = [p \in Prompts |-> Absent] /\ rows = {} /\ dead = {} /\ faults = 0
    /\ mode = [w \in Workers |-> IF w \in Late THEN "out" ELSE "runs"]
    /\ nap = [w \in Workers |-> "awake"]
    /\ held = [w \in Workers |-> {}]
    /\ deadline = [w \in Workers |-> IF w \in Late THEN "none" ELSE "lives"]
    /\ known = [w \in Workers |-> w \notin Late]
    /\ count = [w \in Workers |-> IF w \in Late THEN Unlisted ELSE 0]
    /\ client = [c \in Clients |-> [p \in Prompts |-> "idle"]]

\* Functions of a state.

Job(e) == [n |-> e.n, at |-> e.at]
Is(h, e) == h.p = e.p /\ h.n = e.n /\ h.at = e.at
At(place) == {e \in entries : e.at = place}
Undelivered(place) == {e \in At(place) : e.by = Nobody}
Present(w) == mode[w] \in {"runs", "drains"}
Awake(w) == Present(w) /\ nap[w] # "frozen"
Takes(w) == Awake(w) /\ mode[w] = "runs"
Holds(w, e) == \E h \in held[w] : Is(h, e)
\* A worker renews the leases of entries that it has received, but not of entries that a lost reply contained.
Renewed(e) == Awake(e.by) /\ Holds(e.by, e)
IsAlone(w) == \E e \in entries : e.by = w /\ Holds(w, e) /\ e.d = MaxDeliveries
HasRoom == Cardinality({e \in entries : e.by = Nobody /\ e.at # Backlog}) < Capacity
Open(w) == deadline[w] = "lives" /\ (count[w] # Unlisted \/ Break = "a home needs only live")
Places == IF \E w \in Workers : Open(w) THEN {w \in Workers : Open(w)} ELSE {Shared}
\* Whether workers that claim expired entries find a lane.
Found(v) ==
    /\ deadline[v] # "none" \/ known[v]
    /\ Break = "claims look at listed lanes" => count[v] # Unlisted
\* Whether a worker searches a stream for pending entries whose lease has expired.
Looks(w, place) ==
    \/ place \notin Workers
    \/ place = w /\ Break # "claims look at lanes of the dead"
    \/ \E v \in Workers : v = place /\ deadline[v] = "passed" /\ Found(v)
IsQueued(p) == \E e \in entries : e.p = p /\ Job(e) = waiting[p].job

\* Operations of the scripts.

Taken(p, n, at) ==
    \/ \E e \in entries : e.p = p /\ e.n = n /\ e.at = at
    \/ \E w \in Workers : \E h \in held[w] : h.p = p /\ h.n = n /\ h.at = at
    \/ waiting[p].job = [n |-> n, at |-> at]
\* A new entry gets the smallest number that no entry, worker or key refers to; the server never reuses an id.
Number(p, at) ==
    IF at = Backlog THEN 1
    ELSE CHOOSE n \in 1..9 : ~Taken(p, n, at) /\ \A m \in 1..(n - 1) : Taken(p, m, at)
New(p, at, t) == [p |-> p, n |-> Number(p, at), at |-> at, by |-> Nobody, d |-> 0, t |-> t]
Counted(new) == [w \in Workers |->
    IF count[w] = Unlisted THEN Unlisted ELSE count[w] + Cardinality({e \in new : e.at = w}) - Cardinality(At(w))]
\* Move an entry to another stream, and record it as the job in `waiting:`, even if the server has evicted that key.
Move(e, at) ==
    LET there == New(e.p, at, e.t)
        left == IF Break = "steals do not delete" /\ at \in Workers THEN entries ELSE entries \ {e}
    IN  /\ entries' = left \cup {there}
        /\ waiting' = IF Break = "steals do not say where" /\ at \in Workers /\ e.at # Backlog THEN waiting
                      ELSE [waiting EXCEPT ![e.p].job = Job(there)]
\* Queue a prompt for a client, or for the operator.
Queue(p, who, places) == \E at \in places :
    LET e == New(p, at, 0)
    IN  /\ entries' = entries \cup {e} /\ count' = Counted(entries')
        /\ waiting' = [waiting EXCEPT ![p] = [job |-> Job(e), told |-> @.told \cup {who}]]
Submit(c, p) ==
    Queue(p, c, IF HasRoom /\ At(Backlog) = {} THEN Places ELSE {Backlog})
Join(c, p) == waiting' = [waiting EXCEPT ![p].told = @ \cup {c}] /\ UNCHANGED <<entries, count>>
\* End a job: remove its entries from their streams, and notify the waiting clients.
End(ended, p, outcome) ==
    /\ entries' = entries \ ended
    /\ waiting' = [waiting EXCEPT ![p] = Absent]
    /\ client' = [c \in Clients |->
        IF c \in waiting[p].told /\ client[c][p] = "waits" THEN [client[c] EXCEPT ![p] = outcome] ELSE client[c]]

\* Actions of clients: `submit.lua`, `cancel.lua`.

Asked == Cardinality({x \in Clients \X Prompts : client[x[1]][x[2]] # "idle"})
Becomes(c, p, what) == client' = [client EXCEPT ![c][p] = what]
Ask(c, p) ==
    /\ client[c][p] = "idle" /\ Asked < MaxAsks
    /\ \/ p \in rows /\ Becomes(c, p, "told") /\ UNCHANGED <<entries, waiting, count>>
       \/ /\ p \notin rows /\ Becomes(c, p, "waits")
          /\ IF waiting[p].job # NoJob THEN Join(c, p) ELSE Submit(c, p)
    /\ UNCHANGED <<rows, dead, workers, faults>>
\* A client that has waited for long reads the row; without a row, it queues the prompt again unless a job exists.
Look(c, p) ==
    /\ client[c][p] = "waits" /\ p \in rows /\ Becomes(c, p, "ends")
    /\ UNCHANGED <<entries, waiting, rows, dead, workers, count, faults>>
AskAgain(c, p) ==
    /\ client[c][p] = "waits" /\ p \notin rows /\ ~(c \in waiting[p].told /\ IsQueued(p))
    /\ IF IsQueued(p) THEN Join(c, p) ELSE Submit(c, p)
    /\ UNCHANGED <<rows, dead, workers, client, faults>>
\* A client whose row was evicted before the client read it waits again.
Fetch(c, p) ==
    /\ client[c][p] = "told" /\ Becomes(c, p, IF p \in rows THEN "ends" ELSE "waits")
    /\ UNCHANGED <<entries, waiting, rows, dead, workers, count, faults>>
Hear(c, p) ==
    /\ client[c][p] = "failed" /\ Becomes(c, p, "ends")
    /\ UNCHANGED <<entries, waiting, rows, dead, workers, count, faults>>
Cancel(c, p) ==
    /\ client[c][p] = "waits" /\ c \in waiting[p].told /\ Becomes(c, p, "ends")
    /\ LET job == {e \in entries : e.p = p /\ Job(e) = waiting[p].job}
           seen == IF Break = "cancels look at the shared stream" THEN {e \in job : e.at = Shared} ELSE job
       IN  IF waiting[p].told = {c} /\ \A e \in seen : e.by = Nobody
           THEN entries' = entries \ seen /\ waiting' = [waiting EXCEPT ![p] = Absent]
           ELSE waiting' = [waiting EXCEPT ![p].told = @ \ {c}] /\ UNCHANGED entries
    /\ count' = Counted(entries')
    /\ UNCHANGED <<rows, dead, workers, faults>>

\* Workers take entries: XREADGROUP, `refill.lua`, stealing, `claim_expired.lua`.

Deliver(e, w) == [e EXCEPT !.by = w, !.d = e.d + (IF e.d > MaxDeliveries THEN 0 ELSE 1),
                           !.t = e.t + (IF e.d < MaxDeliveries THEN 1 ELSE 0)]
Fault(what) == what \in Faults /\ faults < MaxFaults /\ faults' = faults + 1
\* A worker holds a delivered entry, unless the reply is lost with its connection.
Hold(w, e, spent) ==
    \/ /\ held' = [held EXCEPT ![w] =
            {h \in @ : ~Is(h, e)} \cup {[p |-> e.p, n |-> e.n, at |-> e.at, spent |-> spent]}]
       /\ UNCHANGED faults
    \/ Fault("lost reply") /\ UNCHANGED held
Take(w) == \E e \in Undelivered(w) \cup Undelivered(Shared) :
    /\ Takes(w) /\ Cardinality(held[w]) < MaxHeld /\ ~IsAlone(w)
    /\ entries' = (entries \ {e}) \cup {Deliver(e, w)}
    /\ Hold(w, e, FALSE)
    /\ UNCHANGED <<waiting, rows, dead, mode, nap, deadline, known, count, client>>
Refill ==
    /\ HasRoom /\ \E e \in At(Backlog) : \E at \in Places : Move(e, at)
    /\ count' = Counted(entries')
    /\ UNCHANGED <<rows, dead, workers, client, faults>>
\* A worker without entries steals undelivered entries of a worker that is busy or frozen.  The thief's lane must be
\* listed, because other workers may already have forgotten the lane of a worker that was declared dead.
Steal(w) ==
    /\ Takes(w) /\ held[w] = {} /\ Undelivered(w) \cup Undelivered(Shared) = {} /\ (At(Backlog) = {} \/ ~HasRoom)
    /\ count[w] # Unlisted \/ Break = "whoever is not listed steals"
    /\ \E v \in Workers \ {w} :
        /\ count[v] # Unlisted
        /\ ~Awake(v) \/ (\E e \in entries : e.by = v) \/ Break = "steals what is young"
        /\ \E e \in IF Break = "steals what is held" THEN At(v) ELSE Undelivered(v) : Move(e, w)
    /\ count' = Counted(entries')
    /\ UNCHANGED <<rows, dead, workers, client, faults>>
Claim(w) == \E e \in entries :
    /\ e.by # Nobody /\ Takes(w) /\ ~Renewed(e) /\ Looks(w, e.at)
    /\ Cardinality(held[w]) < MaxHeld /\ ~IsAlone(w)
    /\ e.d = MaxDeliveries - 1 => held[w] = {} \/ Break = "suspects run with others"
    /\ entries' = (entries \ {e}) \cup {Deliver(e, w)} /\ Hold(w, e, e.d >= MaxDeliveries)
    /\ UNCHANGED <<waiting, rows, dead, mode, nap, deadline, known, count, client>>

\* Workers publish results: SET, `finish.lua`, `drop_unwanted.lua`.

Drop(w, h) == held' = [held EXCEPT ![w] = @ \ {h}]
Store(w, h) ==
    /\ Awake(w) /\ ~h.spent /\ h.p \notin rows /\ rows' = rows \cup {h.p}
    /\ UNCHANGED <<entries, waiting, dead, workers, count, client, faults>>
Finish(w, h) ==
    /\ Awake(w) /\ ~h.spent /\ (h.p \in rows \/ Break = "single flight ends before the row is there")
    /\ Drop(w, h) /\ End({e \in entries : Is(h, e)}, h.p, "told")
    /\ count' = IF Break = "the end of a job lists its lane" /\ h.at \in Workers /\ count[h.at] = Unlisted
                THEN [count EXCEPT ![h.at] = -1] ELSE Counted(entries')
    /\ UNCHANGED <<rows, dead, mode, nap, deadline, known, faults>>
\* A worker makes a prompt a dead letter, but only if it still holds the entry.
Fail(w, h) ==
    /\ Awake(w) /\ h.spent /\ Drop(w, h)
    /\ LET mine == {e \in entries : Is(h, e) /\ e.by = w}
       IN  IF mine = {} THEN UNCHANGED <<entries, waiting, dead, client>>
           ELSE End(mine, h.p, "failed") /\ dead' = dead \cup {h.p}
    /\ count' = Counted(entries')
    /\ UNCHANGED <<rows, mode, nap, deadline, known, faults>>
DropUnwanted(w, h) ==
    /\ Awake(w) /\ waiting[h.p].told = {} /\ \E e \in entries : Is(h, e) /\ e.by = w
    /\ Drop(w, h) /\ End({e \in entries : Is(h, e)}, h.p, "told") /\ count' = Counted(entries')
    /\ UNCHANGED <<rows, dead, mode, nap, deadline, known, faults>>

\* Membership of workers: `register.lua`, closing a lane, `remove_gone.lua`, `add_deadlines.lua`.

Register(w, lists) ==
    /\ deadline' = [deadline EXCEPT ![w] = "lives"] /\ known' = [known EXCEPT ![w] = TRUE]
    /\ count' = IF lists THEN [count EXCEPT ![w] = Cardinality(At(w))] ELSE count
Start(w) ==
    /\ mode[w] = "out" /\ mode' = [mode EXCEPT ![w] = "runs"] /\ Register(w, TRUE)
    /\ UNCHANGED <<entries, waiting, rows, dead, nap, held, client, faults>>
\* The heartbeat of a worker that drains renews its deadline, but does not list its closed lane.
Heartbeat(w) ==
    LET lists == mode[w] = "runs" \/ Break = "heartbeats list whoever drains"
    IN  /\ Awake(w) /\ (deadline[w] # "lives" \/ ~known[w] \/ (lists /\ count[w] = Unlisted)) /\ Register(w, lists)
        /\ UNCHANGED <<entries, waiting, rows, dead, mode, nap, held, client, faults>>
\* Undelivered entries of a lane move to the shared stream.
Emptied(v) == (entries \ Undelivered(v)) \cup {New(e.p, Shared, e.t) : e \in Undelivered(v)}
Empty(v) ==
    /\ entries' = Emptied(v)
    /\ waiting' = [p \in Prompts |->
        IF \E e \in Undelivered(v) : e.p = p
        THEN [waiting[p] EXCEPT !.job = [n |-> Number(p, Shared), at |-> Shared]] ELSE waiting[p]]
    /\ count' = [count EXCEPT ![v] = Unlisted]
CloseLane(w) ==
    /\ Drains /\ w \notin Steady /\ Takes(w) /\ mode' = [mode EXCEPT ![w] = "drains"]
    /\ IF Break = "closing forgets what was not delivered"
       THEN entries' = entries \ Undelivered(w) /\ count' = [count EXCEPT ![w] = Unlisted] /\ UNCHANGED waiting
       ELSE Empty(w)
    /\ UNCHANGED <<rows, dead, nap, held, deadline, known, client, faults>>
Leave(w) ==
    /\ mode[w] = "drains" /\ Awake(w) /\ held[w] = {}
    /\ mode' = [mode EXCEPT ![w] = "gone"] /\ deadline' = [deadline EXCEPT ![w] = "passed"]
    /\ UNCHANGED <<entries, waiting, rows, dead, nap, held, known, count, client, faults>>
Lapse(w) ==
    /\ deadline[w] = "lives" /\ ~Awake(w) /\ deadline' = [deadline EXCEPT ![w] = "passed"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, nap, held, known, count, client, faults>>
\* If the server has lost deadlines, each worker without a deadline gets a new deadline.
AddDeadline(w) ==
    /\ known[w] /\ deadline[w] = "none" /\ \E s \in Workers : Takes(s)
    /\ deadline' = [deadline EXCEPT ![w] = "lives"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, nap, held, known, count, client, faults>>
Sweep(w) ==
    /\ deadline[w] = "passed" /\ \E s \in Workers : Takes(s)
    /\ count[w] # Unlisted \/ Undelivered(w) # {}
    /\ IF Break = "sweeps leave what was not delivered"
       THEN count' = [count EXCEPT ![w] = Unlisted] /\ UNCHANGED <<entries, waiting>>
       ELSE Empty(w)
    /\ UNCHANGED <<rows, dead, workers, client, faults>>
\* A worker stays known while its lane has entries, and while it holds entries of the shared stream.
Forget(w) ==
    /\ known[w] /\ deadline[w] = "passed" /\ count[w] = Unlisted /\ \E s \in Workers : Takes(s)
    /\ \A e \in entries : e.by = w => e.at \notin {w, Shared}
    /\ At(w) = {} \/ Break = "lanes are forgotten with what others hold there"
    /\ known' = [known EXCEPT ![w] = FALSE] /\ deadline' = [deadline EXCEPT ![w] = "none"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, nap, held, count, client, faults>>

\* Faults.

Die(w) ==
    /\ Fault("die") /\ Present(w) /\ w \notin Steady
    /\ mode' = [mode EXCEPT ![w] = "gone"] /\ held' = [held EXCEPT ![w] = {}] /\ nap' = [nap EXCEPT ![w] = "awake"]
    /\ UNCHANGED <<entries, waiting, rows, dead, deadline, known, count, client>>
\* A worker whose backend fails lets its deadline pass at once, so that other workers claim its entries.
Collapse(w) ==
    /\ Fault("collapse") /\ Awake(w) /\ w \notin Steady
    /\ mode' = [mode EXCEPT ![w] = "gone"] /\ held' = [held EXCEPT ![w] = {}] /\ nap' = [nap EXCEPT ![w] = "awake"]
    /\ deadline' = [deadline EXCEPT ![w] = "passed"]
    /\ UNCHANGED <<entries, waiting, rows, dead, known, count, client>>
Freeze(w) ==
    /\ Fault("freeze") /\ Awake(w) /\ nap' = [nap EXCEPT ![w] = "frozen"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, held, deadline, known, count, client>>
Wake(w) ==
    /\ Present(w) /\ nap[w] = "frozen" /\ nap' = [nap EXCEPT ![w] = "was frozen"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, held, deadline, known, count, client, faults>>
EvictRow(p) ==
    /\ Fault("row") /\ p \in rows /\ rows' = rows \ {p}
    /\ UNCHANGED <<entries, waiting, dead, workers, count, client>>
EvictWaiting(p) ==
    /\ Fault("waiting") /\ waiting[p] # Absent /\ waiting' = [waiting EXCEPT ![p] = Absent]
    /\ UNCHANGED <<entries, rows, dead, workers, count, client>>
EvictReplies(c) ==
    /\ Fault("replies") /\ \E p \in Prompts : client[c][p] \in {"told", "failed"}
    /\ client' = [client EXCEPT ![c] = [p \in Prompts |-> IF @[p] \in {"told", "failed"} THEN "waits" ELSE @[p]]]
    /\ UNCHANGED <<entries, waiting, rows, dead, workers, count>>
EvictDeadlines ==
    /\ Fault("deadlines") /\ deadline' = [w \in Workers |-> "none"]
    /\ UNCHANGED <<entries, waiting, rows, dead, mode, nap, held, known, count, client>>
\* A damaged stream is replaced (`keep_queue.lua`), and the new stream has the consumers of the damaged stream.
Replace ==
    /\ Fault("stream") /\ \E w \in Workers : Takes(w)
    /\ entries' = entries \ At(Shared)
    /\ known' = IF Break = "a new stream knows no worker" THEN [w \in Workers |-> FALSE] ELSE known
    /\ UNCHANGED <<waiting, rows, dead, mode, nap, held, deadline, count, client>>
\* An operator retries a dead letter (`retry.lua`); the model counts this among the faults to limit its number.
Retry(p) ==
    /\ Fault("retry") /\ p \in dead /\ dead' = dead \ {p}
    /\ IF IsQueued(p) THEN Join(Keep, p) ELSE Queue(p, Keep, {Shared})
    /\ UNCHANGED <<rows, workers, client>>

\* Steps that happen without a new request or fault.
Step ==
    \/ \E c \in Clients, p \in Prompts : Look(c, p) \/ AskAgain(c, p) \/ Fetch(c, p) \/ Hear(c, p)
    \/ Refill
    \/ \E w \in Workers :
        \/ Take(w) \/ Steal(w) \/ Claim(w)
        \/ \E h \in held[w] : Store(w, h) \/ Finish(w, h) \/ Fail(w, h)
        \/ Heartbeat(w) \/ Leave(w) \/ Lapse(w) \/ AddDeadline(w) \/ Sweep(w) \/ Forget(w)
        \/ w \in Steady /\ (Start(w) \/ Wake(w))
Next ==
    \/ Step
    \/ \E c \in Clients, p \in Prompts : Ask(c, p) \/ Cancel(c, p)
    \/ \E w \in Workers :
        \/ Start(w) \/ CloseLane(w) \/ Die(w) \/ Collapse(w) \/ Freeze(w) \/ Wake(w)
        \/ \E h \in held[w] : DropUnwanted(w, h)
    \/ \E p \in Prompts : EvictRow(p) \/ EvictWaiting(p) \/ Retry(p)
    \/ \E c \in Clients : EvictReplies(c)
    \/ EvictDeadlines \/ Replace
Spec == Init /\ [][Next]_vars /\ WF_vars(Step)

\* Invariants that hold although the server evicts keys.

\* Workers that claim expired entries find each lane that has entries.
Reachable == \A e \in entries : e.at \in Workers => Found(e.at)
\* The lane of a worker that drains has no undelivered entries.
Closed == \A w \in Workers : mode[w] = "drains" => Undelivered(w) = {}
\* The list of lanes contains the length of each lane.
Listed == \A w \in Workers : count[w] # Unlisted => count[w] = Cardinality(At(w))
\* The server counts each delivery of an entry, and a prompt is not computed after its third delivery.
Deliveries == \A e \in entries : e.t <= MaxDeliveries /\ (e.d = e.t \/ e.d > MaxDeliveries)
\* A worker runs a prompt that may have crashed two workers without other prompts.
Alone == \A w \in Workers : Awake(w) /\ IsAlone(w) => Cardinality(held[w]) = 1
\* If a worker was never frozen, no other worker holds an entry that it computes.
Exclusive == \A w \in Workers : nap[w] = "awake" => \A e \in entries : Holds(w, e) => e.by = w
\* If a worker runs and no step is possible, then no client waits.
Ended ==
    (\E w \in Workers : Takes(w)) /\ ~ENABLED <<Step>>_vars
        => \A c \in Clients, p \in Prompts : client[c][p] \in {"idle", "ends"}

\* Invariants that hold while the server loses no data.

\* A prompt that a client waits for is in a stream or the backlog, and its end will be reported to the client.
Kept == \A c \in Clients, p \in Prompts : client[c][p] = "waits" => c \in waiting[p].told /\ IsQueued(p)
\* A prompt has one entry, and its key names this entry, unless its row is already stored.
SingleFlight == \A e \in entries :
    /\ waiting[e.p].job = Job(e) \/ e.p \in rows
    /\ \A f \in entries : f.p = e.p => f = e
\* A client that is notified of a row finds the row.
Told == \A c \in Clients, p \in Prompts : client[c][p] = "told" => p \in rows

\* Every wait of a client ends.
Ends == \A c \in Clients, p \in Prompts :
    client[c][p] \in {"waits", "told", "failed"} ~> client[c][p] \in {"idle", "ends"}
====
