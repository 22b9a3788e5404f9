# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Diagnose a run
#
# Multi-agent training rises and then goes wrong. Which role did what, when, and how sure is that?
# This page reads a run, asks for a diagnosis and draws the two figures that show the evidence.
#
# The run here is synthetic: Voting under a shared policy, where one role's gradient takes over late in
# training while the other role's replies drift. So we know what there is to find. For a run of your own,
# replace the next cell by `run = gradscope.open_run("runs/NAME")`; everything below stays the same.

# %%
from IPython.display import display

import gradscope
from gradscope import figures, synthetic
from gradscope.report.text import render

run, planted = synthetic.make_run("capture", seed=2)
print(planted)

# %% [markdown]
# A run is an `xarray.DataTree`. Every variable says its dims, its units and what it is.

# %%
run["updates"]["gram"]

# %% [markdown]
# ## What the log says
#
# Each detector looks for one thing. A finding names the role, the step and the numbers behind it;
# what the log cannot tell is listed too.

# %%
diagnosis = gradscope.diagnose(run)
print(render(diagnosis))

# %% [markdown]
# ## Accuracy
#
# The band is the binomial interval of each evaluation. A peak and an onset are marked only if the cliff
# detector sees a cliff; a captured role need not cost accuracy at once.

# %%
figures.FIGURES.get("accuracy")([run])

# %% [markdown]
# ## Whose gradient moved the shared policy
#
# Solid lines are measured shares of the gradient, dashed lines what the numbers of rows alone would give:
# three generators write three times as many rows as one aggregator. A share that leaves its dashed line
# is more than a count.

# %%
shares = figures.FIGURES.get("shares")([run])
display(shares)

# %% [markdown]
# The plotted numbers come with the picture, and `shares.save("figures", "shares")` writes both as PDF, PNG
# and CSV. Several runs in the list become bands: seeds of one cell are averaged, policies stand side by side.

# %%
shares.table.query("quantity == 'energy_share' and drawn_as == 'line'").tail()
