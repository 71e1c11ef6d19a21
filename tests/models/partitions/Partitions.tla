---- MODULE Partitions ----
(* Model of one prompt in a queue with several partitions: how clients agree on a partition, and how workers move.

   One action is one call of a script, or a step of a process between two calls. Lanes.tla models a single partition.

   record    the partition in which clients wait for the prompt, which `meet.lua` reads and writes on the master of
             partition R (the one that the prompt's digest decides)
   up        masters that answer; a master that is down keeps its data
   job       per partition: "none", "queued", or the worker that holds the job
   waits     per partition: the clients under the prompt's key `waiting:`
   row       whether the row is cached
   client    state of each client: "idle", "chose", "waits", "told"
   choice    the partition that a client has chosen, or where it waits
   view      partitions that a client uses for new prompts: at its last poll they had live workers
   place     the partition that a worker serves; "between" two partitions, or "gone" (killed)
   listed    per partition: the workers whose deadlines have not passed
   changes   1 if there was a reason for a second job of the prompt, else 0; see Once

   The model has no time: a lease may pass at any moment at which its worker does not serve the partition. *)
EXTENDS Integers, FiniteSets, TLC
CONSTANTS
    Workers, Clients, Partitions,
    R,          \* the partition with the record
    Steady,     \* workers that are never killed
    MaxKills, MaxDowns, MaxLosses,  \* max killed workers, masters that go down, and records that expire too early
    MaxMoves,   \* max moves of workers
    Break       \* name of the broken rule; "" if no rule is broken
VARIABLES record, up, job, waits, row, client, choice, view, place, listed, changes, kills, downs, losses, moves
vars == <<record, up, job, waits, row, client, choice, view, place, listed, changes, kills, downs, losses, moves>>
counts == <<kills, downs, losses, moves>>
queue == <<record, up, job, waits, row>>
clients == <<client, choice, view>>

None == "none"
\* Two jobs of the prompt are the most that two partitions can have.
More == 1
First == CHOOSE p \in Partitions : TRUE
Symmetry == Permutations(Clients)

Init ==
    /\ record = None /\ up = Partitions /\ job = [p \in Partitions |-> None] /\ waits = [p \in Partitions |-> {}]
    /\ row = FALSE /\ client = [c \in Clients |-> "idle"] /\ choice = [c \in Clients |-> None]
    /\ place \in {start \in [Workers -> Partitions] : \A w \in Steady : start[w] = R}
    /\ listed = [p \in Partitions |-> {w \in Workers : place[w] = p}]
    /\ view = [c \in Clients |-> {p \in Partitions : listed[p] # {}}]
    /\ changes = 0 /\ kills = 0 /\ downs = 0 /\ losses = 0 /\ moves = 0

\* Clients

Usable == LET live == {p \in up : listed[p] # {}} IN IF live # {} THEN live ELSE IF up # {} THEN {CHOOSE p \in up : TRUE} ELSE {First}

Poll(c) ==
    /\ client[c] \in {"idle", "waits"} /\ view[c] # Usable
    /\ view' = [view EXCEPT ![c] = Usable]
    /\ UNCHANGED <<queue, client, choice, place, listed, changes, counts>>

\* A client that waits keeps its partition while it uses this partition; the record may still lead it to another one.
Wanted(c) == IF choice[c] \in view[c] THEN {choice[c]} ELSE view[c]

Meet(c) ==
    /\ client[c] = "idle" /\ ~row
    /\ \E q \in Wanted(c) :
        LET is_kept == record \in view[c] /\ Break # "the last client decides"
            \* Without a record, clients that wait in partition R decide.
            is_here == R \in view[c] /\ waits[R] # {} /\ Break # "waiting clients are not seen"
            agreed == IF R \notin up \/ Break = "no record" THEN q
                      ELSE IF is_kept THEN record ELSE IF is_here THEN R ELSE q
        IN  /\ record' = IF R \in up /\ Break # "no record" THEN agreed ELSE record
            /\ choice' = [choice EXCEPT ![c] = agreed]
            \* Another partition than before, and clients that cannot read the record, may cause a second computation.
            /\ changes' = IF (record # None /\ record \notin view[c]) \/ R \notin up
                              \/ (waits[R] # {} /\ R \notin view[c]) THEN More ELSE changes
    /\ client' = [client EXCEPT ![c] = "chose"]
    /\ UNCHANGED <<up, job, waits, row, view, place, listed, counts>>

\* A submission to partition R needs no other call: `submit.lua` itself reads the record.
Direct(c) ==
    /\ client[c] = "idle" /\ ~row /\ R \in Wanted(c) \cap up
    /\ record \in {None, R} \/ Break = "records are not read"
    /\ client' = [client EXCEPT ![c] = "waits"] /\ choice' = [choice EXCEPT ![c] = R]
    /\ waits' = [waits EXCEPT ![R] = @ \cup {c}]
    /\ job' = [job EXCEPT ![R] = IF @ = None THEN "queued" ELSE @]
    /\ changes' = IF \E p \in Partitions : c \in waits[p] /\ p # R THEN More ELSE changes
    /\ UNCHANGED <<record, up, row, view, place, listed, counts>>

Submit(c) ==
    LET q == choice[c] IN
    /\ client[c] = "chose"
    /\ IF row THEN
         /\ client' = [client EXCEPT ![c] = "told"] /\ UNCHANGED <<waits, job, view>>
       ELSE IF q \in up THEN
         /\ client' = [client EXCEPT ![c] = "waits"] /\ UNCHANGED view
         /\ waits' = [waits EXCEPT ![q] = @ \cup {c}]
         /\ job' = [job EXCEPT ![q] = IF @ = None THEN "queued" ELSE @]
       ELSE
         /\ client' = [client EXCEPT ![c] = "idle"] /\ UNCHANGED <<waits, job>>
         /\ view' = [view EXCEPT ![c] = IF @ = {q} THEN Partitions \ {q} ELSE @ \ {q}]
    /\ UNCHANGED <<record, up, row, choice, place, listed, changes, counts>>

\* After a lease without a reply, a client looks up the row, and submits the prompt again.
Recheck(c) ==
    /\ client[c] = "waits"
    /\ client' = [client EXCEPT ![c] = IF row THEN "told" ELSE "idle"]
    /\ row \/ choice[c] \notin view[c] \/ (choice[c] \in up /\ c \notin waits[choice[c]])
    /\ UNCHANGED <<queue, choice, view, place, listed, changes, counts>>

Find(c) ==
    /\ client[c] = "idle" /\ row
    /\ client' = [client EXCEPT ![c] = "told"]
    /\ UNCHANGED <<queue, choice, view, place, listed, changes, counts>>

\* Workers

Holds(w) == {p \in Partitions : job[p] = w}

Take(w) ==
    /\ place[w] \in up /\ job[place[w]] = "queued" /\ Holds(w) = {}
    /\ job' = [job EXCEPT ![place[w]] = w]
    /\ UNCHANGED <<record, up, waits, row, clients, place, listed, changes, counts>>

Finish(w) ==
    \E p \in Holds(w) :
        /\ place[w] # "gone" /\ p \in up
        /\ row' = TRUE
        /\ job' = [job EXCEPT ![p] = None] /\ waits' = [waits EXCEPT ![p] = {}]
        /\ client' = [c \in Clients |-> IF c \in waits[p] /\ client[c] # "chose" THEN "told" ELSE client[c]]
        /\ UNCHANGED <<record, up, choice, view, place, listed, changes, counts>>

\* A worker that holds no job leaves its partition. If the master is down, other workers remove it after a lease.
Leave(w) ==
    LET p == place[w] IN
    /\ p \in Partitions /\ moves < MaxMoves
    /\ Holds(w) = {} \/ Break = "moves with a job"
    /\ place' = [place EXCEPT ![w] = "between"] /\ moves' = moves + 1
    /\ listed' = IF p \in up /\ Break # "stays listed" THEN [listed EXCEPT ![p] = @ \ {w}] ELSE listed
    /\ UNCHANGED <<queue, clients, changes, kills, downs, losses>>

\* A move for rescue: another partition has a job and no worker. These moves have no limit.
Rescue(w) ==
    LET p == place[w] IN
    /\ Break # "no rescue" /\ p \in Partitions /\ Holds(w) = {}
    /\ listed[p] # {w} \/ job[p] = None \/ p \notin up
    /\ \E q \in up : job[q] # None /\ {v \in listed[q] : place[v] = q} = {} /\ listed[q] = {}
    /\ place' = [place EXCEPT ![w] = "between"]
    /\ listed' = IF p \in up THEN [listed EXCEPT ![p] = @ \ {w}] ELSE listed
    /\ UNCHANGED <<queue, clients, changes, counts>>

Join(w) ==
    /\ place[w] = "between"
    /\ \E q \in up :
        /\ \A p \in up : job[p] # None /\ listed[p] = {} => job[q] # None /\ listed[q] = {}
        /\ place' = [place EXCEPT ![w] = q] /\ listed' = [listed EXCEPT ![q] = @ \cup {w}]
    /\ UNCHANGED <<queue, clients, changes, counts>>

Expire(w) ==
    \E p \in up :
        /\ w \in listed[p] /\ place[w] # p
        /\ listed' = [listed EXCEPT ![p] = @ \ {w}]
        /\ UNCHANGED <<queue, clients, place, changes, counts>>

\* The lease of a job of a killed worker passes, and another worker claims the job.
Claim(w) ==
    LET p == place[w] IN
    /\ p \in up /\ Holds(w) = {} /\ job[p] \in Workers /\ place[job[p]] = "gone"
    /\ job' = [job EXCEPT ![p] = w]
    /\ UNCHANGED <<record, up, waits, row, clients, place, listed, changes, counts>>

\* Faults

Kill(w) ==
    /\ kills < MaxKills /\ w \notin Steady /\ place[w] # "gone"
    /\ place' = [place EXCEPT ![w] = "gone"] /\ kills' = kills + 1
    /\ UNCHANGED <<queue, clients, listed, changes, downs, losses, moves>>

Down(p) ==
    /\ downs < MaxDowns /\ p \in up
    /\ up' = up \ {p} /\ downs' = downs + 1
    /\ UNCHANGED <<record, job, waits, row, clients, place, listed, changes, kills, losses, moves>>

Up(p) ==
    /\ p \notin up
    /\ up' = up \cup {p}
    /\ UNCHANGED <<record, job, waits, row, clients, place, listed, changes, counts>>

Lose ==
    /\ losses < MaxLosses /\ record # None
    /\ record' = None /\ losses' = losses + 1 /\ changes' = More
    /\ UNCHANGED <<up, job, waits, row, clients, place, listed, kills, downs, moves>>

Client(c) == Poll(c) \/ Direct(c) \/ Meet(c) \/ Submit(c) \/ Recheck(c) \/ Find(c)
Worker(w) == Take(w) \/ Finish(w) \/ Rescue(w) \/ Join(w) \/ Expire(w) \/ Claim(w)
Next ==
    \/ \E c \in Clients : Client(c)
    \/ \E w \in Workers : Worker(w) \/ Leave(w) \/ Kill(w)
    \/ \E p \in Partitions : Down(p) \/ Up(p)
    \/ Lose
Spec ==
    /\ Init /\ [][Next]_vars
    /\ \A c \in Clients :
        WF_vars(Poll(c)) /\ WF_vars(Meet(c)) /\ WF_vars(Submit(c)) /\ WF_vars(Recheck(c)) /\ WF_vars(Find(c))
    /\ \A w \in Workers :
        /\ WF_vars(Take(w)) /\ WF_vars(Finish(w)) /\ WF_vars(Join(w)) /\ WF_vars(Expire(w)) /\ WF_vars(Claim(w))
        /\ WF_vars(Rescue(w))
    /\ \A p \in Partitions : WF_vars(Up(p))

\* Properties

\* All clients meet in one partition: two jobs exist only if a record was replaced, lost, or could not be read.
Once == Cardinality({p \in Partitions : job[p] # None}) <= 1 + changes
\* A worker holds a job only in the partition that it serves.
Own == \A w \in Workers : place[w] # "gone" => Holds(w) \subseteq {place[w]}
\* While all masters answered, a worker is listed in one partition at most.
Listed == downs = 0 => \A w \in Workers : Cardinality({p \in Partitions : w \in listed[p]}) <= 1
\* Every client gets the row.
Ends == \A c \in Clients : <>[](client[c] = "told")
\* No job stays in a partition that no worker serves.
Cleared == <>[](\A p \in Partitions : job[p] = None)
====
