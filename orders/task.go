package orders

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// TaskClose tells the gateway to close the payment page of an order, until it gives an answer.
const TaskClose = "close"

// Task is a thing that the gateway has to be told until it answers. A task that has its answer is gone; the order's story keeps it.
type Task struct {
	OrderID  int64
	Kind     string // TaskClose
	Attempts int    // earlier tries without an answer
}

// TaskClaim is a set of tasks that the caller alone may work on, until Until by the database's clock. As for [Claim], marks carry the token.
type TaskClaim struct {
	Token string
	Until time.Time
	Rows  []Task
}

// addTasks writes tasks to be done at once. One that is there already starts anew, and is taken away from whoever works on it: what that one
// was told may have been said before the thing that makes this task necessary.
func (t *txn) addTasks(ctx context.Context, ids []int64, kind string) error {
	for _, id := range ids {
		_, err := t.exec(ctx, `INSERT INTO gateway_tasks (order_id, kind, attempts, created_at, available_at) VALUES (?, ?, 0, ?, ?)
			ON DUPLICATE KEY UPDATE attempts = 0, available_at = ?, lease_token = NULL`, id, kind, at(t.now), at(t.now), at(t.now))
		if err != nil {
			return fmt.Errorf("write task %s of order %d: %w", kind, id, err)
		}
	}
	return nil
}

// ClaimTasks leases up to limit tasks whose time has come, oldest first, and skips those that somebody else is claiming. An empty claim means
// that there is nothing to do. The lease has to be longer than the work on a task may take. A close whose order waits for its money again, since
// its deadline was moved, is dropped: the page is the customer's until that deadline, and is closed before the order is cancelled then.
func (s *Store) ClaimTasks(ctx context.Context, limit int, lease time.Duration) (TaskClaim, error) {
	if limit < 1 || limit > maxRows || lease <= 0 {
		return TaskClaim{}, invalid("claim of %d tasks for %s; allowed are 1 to %d and a positive lease", limit, lease, maxRows)
	}
	var claim TaskClaim
	err := s.inTx(ctx, "claim tasks for the gateway", func(ctx context.Context, t *txn) error {
		claim = TaskClaim{Token: newToken(), Until: t.now.Add(lease)}
		err := t.each(ctx, `SELECT order_id, kind, attempts FROM gateway_tasks FORCE INDEX (gateway_tasks_to_do)
			WHERE available_at <= ? ORDER BY available_at, order_id LIMIT ? FOR UPDATE SKIP LOCKED`, []any{at(t.now), limit}, func(rows *sql.Rows) error {
			var task Task
			err := rows.Scan(&task.OrderID, &task.Kind, &task.Attempts)
			claim.Rows = append(claim.Rows, task)
			return err
		})
		if err != nil {
			return fmt.Errorf("select tasks: %w", err)
		}
		if claim.Rows, err = t.dropUnneeded(ctx, claim.Rows); err != nil {
			return err
		}
		for _, task := range claim.Rows {
			n, err := t.exec(ctx, "UPDATE gateway_tasks SET available_at = ?, lease_token = ? WHERE order_id = ? AND kind = ?", at(claim.Until), claim.Token, task.OrderID, task.Kind)
			if err != nil {
				return fmt.Errorf("lease task %s of order %d: %w", task.Kind, task.OrderID, err)
			}
			if n != 1 {
				return fmt.Errorf("task %s of order %d is locked and did not match: %w", task.Kind, task.OrderID, errAgain)
			}
		}
		return nil
	})
	if err != nil {
		return TaskClaim{}, err
	}
	return claim, nil
}

// AnswerNotAsked is the answer of a task that was dropped, in its order's story.
const AnswerNotAsked = "not_asked"

// dropUnneeded ends the closes among locked tasks whose orders are unpaid and not due, and gives the others. The orders are only read: they come
// before the tasks in the lock order, and one whose deadline is moved in this very moment is closed a moment too late to be saved anyway.
func (t *txn) dropUnneeded(ctx context.Context, tasks []Task) ([]Task, error) {
	var ids []any
	for _, task := range tasks {
		if task.Kind == TaskClose {
			ids = append(ids, task.OrderID)
		}
	}
	if len(ids) == 0 {
		return tasks, nil
	}
	open := map[int64]bool{}
	err := t.each(ctx, "SELECT id FROM orders FORCE INDEX (PRIMARY) WHERE id IN ("+marks(len(ids))+") AND status = 'unpaid' AND (deadline_at IS NULL OR deadline_at > ?)", append(ids, at(t.now)),
		func(rows *sql.Rows) error {
			var id int64
			err := rows.Scan(&id)
			open[id] = true
			return err
		})
	if err != nil {
		return nil, fmt.Errorf("read the orders of %d tasks: %w", len(ids), err)
	}
	var needed []Task
	var events []Event
	for _, task := range tasks {
		if task.Kind != TaskClose || !open[task.OrderID] {
			needed = append(needed, task)
			continue
		}
		if _, err := t.exec(ctx, "DELETE FROM gateway_tasks WHERE order_id = ? AND kind = ?", task.OrderID, task.Kind); err != nil {
			return nil, fmt.Errorf("drop task %s of order %d: %w", task.Kind, task.OrderID, err)
		}
		e, err := event(task.OrderID, EventGateway, ActorLapse, map[string]any{"call": task.Kind, "answer": AnswerNotAsked, "because": "the order is not due any more", "attempts": task.Attempts})
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	return needed, t.addEvents(ctx, events)
}

// TaskDone ends a task with the gateway's answer, which the order's story keeps. It is false where the lease was lost, or the task began anew
// meanwhile: somebody else does it.
func (s *Store) TaskDone(ctx context.Context, token string, task Task, answer string) (bool, error) {
	return s.endTask(ctx, token, task, answer, nil)
}

// TaskGivenUp ends a task as TaskDone does, with an answer that nothing can be made of, and parks its order with the reason: a person has to
// see to it. It is false where the lease was lost, and parks nothing then.
func (s *Store) TaskGivenUp(ctx context.Context, token string, task Task, answer, reason string) (bool, error) {
	return s.endTask(ctx, token, task, answer, []Parked{{What: ParkedOrder, Ref: FormatID(task.OrderID), Reason: reason}})
}

func (s *Store) endTask(ctx context.Context, token string, task Task, answer string, park []Parked) (bool, error) {
	held := false
	err := s.inTx(ctx, task.doing("end"), func(ctx context.Context, t *txn) error {
		n, err := t.exec(ctx, "DELETE FROM gateway_tasks WHERE order_id = ? AND kind = ? AND lease_token = ?", task.OrderID, task.Kind, token)
		if held = n == 1; err != nil || !held {
			return err
		}
		e, err := event(task.OrderID, EventGateway, ActorLapse, map[string]any{"call": task.Kind, "answer": clip(answer, 1024), "attempts": task.Attempts + 1})
		if err != nil {
			return err
		}
		if err := t.addEvents(ctx, []Event{e}); err != nil {
			return err
		}
		return t.park(ctx, park)
	})
	return held, err
}

// TaskRetry gives a task back that got no answer: another attempt may be made after pause. It is false where the lease was lost.
func (s *Store) TaskRetry(ctx context.Context, token string, task Task, pause time.Duration, cause error) (bool, error) {
	held := false
	err := s.inTx(ctx, task.doing("put off"), func(ctx context.Context, t *txn) error {
		n, err := t.exec(ctx, "UPDATE gateway_tasks SET available_at = ?, lease_token = NULL, attempts = attempts + 1, last_error = ? WHERE order_id = ? AND kind = ? AND lease_token = ?",
			at(t.now.Add(pause)), clip(cause.Error(), 1024), task.OrderID, task.Kind, token)
		held = n == 1
		return err
	})
	return held, err
}

func (task Task) doing(verb string) string {
	return fmt.Sprintf("%s task %s of order %d", verb, task.Kind, task.OrderID)
}

// Owed is what still has to be done at the gateway.
type Owed struct {
	Refunds       int64
	OldestRefund  time.Duration // how long ago the oldest pending refund was written; 0: none
	Tasks         int64
	OldestTask    time.Duration
	GivenUpRefund int64 // refunds that were given up and wait for a person; one that was discarded has had one
}

// Owed reads what still has to be done at the gateway. It takes no locks and reads only what is pending.
func (s *Store) Owed(ctx context.Context) (Owed, error) {
	var o Owed
	var refund, task int64 // milliseconds
	err := s.db.QueryRowContext(ctx, `SELECT
		(SELECT COUNT(*) FROM refunds FORCE INDEX (refunds_to_do) WHERE state = 'pending'),
		(SELECT COALESCE(MAX(TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(3))), 0) DIV 1000 FROM refunds FORCE INDEX (refunds_to_do) WHERE state = 'pending'),
		(SELECT COUNT(*) FROM gateway_tasks),
		(SELECT COALESCE(MAX(TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(3))), 0) DIV 1000 FROM gateway_tasks),
		(SELECT COUNT(*) FROM refunds r FORCE INDEX (refunds_to_do) JOIN parked k FORCE INDEX (parked_by_ref)
			ON k.what = 'payment' AND k.ref = CONCAT(r.gateway, ':', r.transaction_id) AND k.state = 'parked' WHERE r.state = 'given_up')`).
		Scan(&o.Refunds, &refund, &o.Tasks, &task, &o.GivenUpRefund)
	if err != nil {
		return Owed{}, fmt.Errorf("read what is owed at the gateway: %w", err)
	}
	o.OldestRefund, o.OldestTask = time.Duration(refund)*time.Millisecond, time.Duration(task)*time.Millisecond
	return o, nil
}
